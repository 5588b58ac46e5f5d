/* Functions that the stand-ins for the runtime and the driver lack. They neither capture nor share anything: the library
 * only has to see the calls. */
#include <stddef.h>
#include <stdint.h>

int cudaStreamBeginCapture(void *stream, int mode);
int cudaStreamEndCapture(void *stream, void **graph);
int cuMemGetHandleForAddressRange(int *handle, uint64_t address, size_t bytes, int kind, unsigned long long flags);

int cudaStreamBeginCapture(void *stream, int mode)
{
	(void)stream;
	(void)mode;
	return 0;
}

int cudaStreamEndCapture(void *stream, void **graph)
{
	(void)stream;
	*graph = NULL;
	return 0;
}

int cuMemGetHandleForAddressRange(int *handle, uint64_t address, size_t bytes, int kind, unsigned long long flags)
{
	(void)kind;
	(void)flags;
	*handle = 1;
	return address && bytes ? 0 : 1;
}
