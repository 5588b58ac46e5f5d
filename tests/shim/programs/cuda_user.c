/* A library that uses the runtime, as torch's do. It is built both with and without linking to the runtime. */
#include <stddef.h>

struct handle {
	char bytes[64];
};

int cudaMallocManaged(void **memory, size_t bytes, unsigned int flags);
int cudaIpcGetMemHandle(struct handle *handle, void *memory);
int cudaIpcOpenMemHandle(void **memory, struct handle handle, unsigned int flags);

/* 0 if every result is correct. */
int use_runtime(void)
{
	struct handle handle = {{0}};
	void *memory = NULL;
	char byte = 5;

	if (cudaMallocManaged(&memory, 100, 1) != 0 || memory != (void *)101)
		return 1;
	if (cudaMallocManaged(&memory, 0, 1) != 2)
		return 2;
	if (cudaIpcGetMemHandle(&handle, &byte) != 0 || handle.bytes[0] != 5)
		return 3;
	if (cudaIpcOpenMemHandle(&memory, handle, 1) != 0 || memory != (void *)6)
		return 4;
	return 0;
}
