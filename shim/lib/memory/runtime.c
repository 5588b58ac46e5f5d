/* Calls that are passed on to CUDA, and the device that the caller's CUDA runtime uses. */
#define _GNU_SOURCE
#include "lookup.h"
#include "memory.h"

_Thread_local unsigned int memory_passes_on;

bool called_by_program(void)
{
	return !memory_passes_on;
}

bool enter_runtime_device(const void *caller)
{
	int (*get_device)(int *) = REAL_FOR(cudaGetDevice, CUDA_RUNTIME, (int *), caller);
	int (*free_nothing)(void *) = REAL_FOR(cudaFree, CUDA_RUNTIME, (void *), caller);
	int wanted = -1, current = -2;

	if (!get_device || !free_nothing || PASS_ON(get_device(&wanted)) != 0)
		return false;
	if (driver() && driver()->cuCtxGetDevice(&current) == 0 && current == wanted)
		return true;
	return PASS_ON(free_nothing(NULL)) == 0;
}
