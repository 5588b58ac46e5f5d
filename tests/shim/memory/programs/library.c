/* A library that allocates device memory. */
#include <stddef.h>

extern int cudaMalloc(void **, size_t);
int take(void **memory, size_t bytes);

int take(void **memory, size_t bytes)
{
	int status = cudaMalloc(memory, bytes);

	return status; /* not a tail call, so that the caller is this library */
}
