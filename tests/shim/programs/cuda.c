/* Stands for libcuda.so.1 (-DDRIVER) or libcudart.so.12: the calls that are counted, and a thread of the driver. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/prctl.h>
#include <unistd.h>

struct handle {
	char bytes[64];
};

#ifdef DRIVER

volatile uint64_t driver_steps;
static volatile int driver_ends;

static void *work(void *argument)
{
	prctl(PR_SET_NAME, (const char *)argument);
	while (!driver_ends) {
		driver_steps++;
		usleep(100);
	}
	if (driver_ends == 2)
		pthread_exit(NULL);
	return NULL;
}

static pthread_t thread;

int cuInit(unsigned int flags)
{
	(void)flags;
	return pthread_create(&thread, NULL, work, "some-driver");
}

int cuEnd(int how)
{
	driver_ends = how;
	return pthread_join(thread, NULL);
}

/* The code after the call prevents a tail call, which would leave no return address on the stack. */
int cuSleep(void)
{
	return pause() + 1;
}

int cuSleepForEver(void)
{
	for (;;)
		pause();
}

int cuSleepInCall(void)
{
	return (int)syscall(SYS_ppoll, NULL, 0, NULL, NULL, 0) + 1;
}

int cuSpin(volatile int *word)
{
	for (*word = 1; *word == 1;)
		;
	return 0;
}

int cuFill(volatile int *word)
{
	static char bytes[1 << 16];
	void *(*volatile fill)(void *, int, size_t) = memset;

	for (*word = 1; *word == 1;)
		fill(bytes, *word, sizeof(bytes));
	return bytes[0];
}

int cuMemAllocManaged(uint64_t *memory, size_t bytes, unsigned int flags)
{
	*memory = bytes;
	return flags == 1 ? 0 : 1;
}

int cuIpcGetMemHandle(struct handle *handle, uint64_t memory)
{
	handle->bytes[63] = (char)memory;
	return 0;
}

int cuIpcOpenMemHandle_v2(uint64_t *memory, struct handle handle, unsigned int flags)
{
	*memory = (uint64_t)handle.bytes[63] + flags;
	return 0;
}

int cuIpcCloseMemHandle(uint64_t memory)
{
	return memory == 7 ? 0 : 1;
}

#else

int cudaMallocManaged(void **memory, size_t bytes, unsigned int flags)
{
	*memory = (void *)(bytes + flags);
	return bytes ? 0 : 2;
}

int cudaIpcGetMemHandle(struct handle *handle, void *memory)
{
	handle->bytes[0] = *(char *)memory;
	return 0;
}

int cudaIpcOpenMemHandle(void **memory, struct handle handle, unsigned int flags)
{
	*memory = (void *)(uintptr_t)((unsigned int)handle.bytes[0] + flags);
	return 0;
}

#endif
