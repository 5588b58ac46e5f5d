/* A library with memory of its own. */
#include <stddef.h>

extern int cudaMalloc(void **, size_t);
int take(void **memory, size_t bytes);

int take(void **memory, size_t bytes)
{
	int status = cudaMalloc(memory, bytes);

	return status; /* not in the caller's place */
}
