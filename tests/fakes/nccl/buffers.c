/* Device memory of a communicator, as NCCL allocates for its channels. It comes from the CUDA runtime of the process,
 * if it has one and FAKE_NCCL_BUFFER_MIB is set. Operations do not use it, but it is visible on the GPU while the
 * communicator exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "communicator.h"
#include "errors.h"

/* It contains only a pattern, which must be intact when the communicator ends. */
#define PATTERN 0xa5
#define CHECKED_BYTES 4096

static void *runtime(const char *name)
{
	return dlsym(RTLD_DEFAULT, name);
}

ncclResult_t buffer_get(struct ncclComm *comm)
{
	const char *wanted = getenv("FAKE_NCCL_BUFFER_MIB");
	size_t bytes = wanted ? (size_t)strtoul(wanted, NULL, 10) << 20 : 0;
	int (*allocate)(void **, size_t) = runtime("cudaMalloc");
	int (*fill)(void *, int, size_t) = runtime("cudaMemset");

	if (!bytes || !allocate || !fill)
		return ncclSuccess;
	if (allocate(&comm->buffer, bytes) || fill(comm->buffer, PATTERN, bytes))
		return failed(ncclUnhandledCudaError, "no device memory for the communicator's buffer");
	return ncclSuccess;
}

void buffer_drop(struct ncclComm *comm)
{
	int (*copy)(void *, const void *, size_t, int) = runtime("cudaMemcpy");
	int (*release)(void *) = runtime("cudaFree");
	unsigned char seen[CHECKED_BYTES], expected[CHECKED_BYTES];

	if (!comm->buffer || !copy || !release)
		return;
	memset(expected, PATTERN, sizeof(expected));
	if (copy(seen, comm->buffer, sizeof(seen), 2) || memcmp(seen, expected, sizeof(seen)) != 0)
		abort(); /* the memory was released or overwritten */
	release(comm->buffer);
}
