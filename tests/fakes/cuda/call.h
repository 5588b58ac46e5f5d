/* What every exported call of the driver begins with.
 *
 * Each that needs an initialised driver passes the gate (CALL), so that it waits while the process is locked; those that want
 * the driver's lock alone (CALL_ALONE) wait for more, see gate.c.
 */
#ifndef FAKE_CUDA_CALL_H
#define FAKE_CUDA_CALL_H

#include "cuda_abi.h"
#include "process.h"

/* Runs a block past the gate; `result` is what the call returns. */
#define CALL(...) PASS(process_enter, __VA_ARGS__)
#define CALL_ALONE(...) PASS(process_enter_alone, __VA_ARGS__)
#define PASS(enter, ...)                                     \
	do {                                                 \
		CUresult result = enter();                   \
		if (result != CUDA_SUCCESS)                  \
			return result;                       \
		__VA_ARGS__ process_leave();                 \
		return result;                               \
	} while (0)

int current_gpu(void); /* of the thread's context; -1: it has none */
CUcontext context_of(int gpu);

#endif
