/* The driver's calls that copy and fill.
 *
 * An asynchronous copy between the device and pinned memory is done only when its stream is waited for. So a program
 * that reads too early, waits for the wrong stream or unmaps too soon fails. The real driver may copy earlier, and
 * usually does.
 */
#include "copies.h"

#include <pthread.h>
#include <string.h>

#include "call.h"
#include "faults.h"
#include "memory.h"
#include "pinned.h"

#define MAX_WAITING 1024

static CUresult to_device(CUdeviceptr to, const void *from, size_t bytes)
{
	if (!bytes)
		return CUDA_SUCCESS;
	if (!from || !memory_can_write(to, bytes))
		return CUDA_ERROR_INVALID_VALUE;
	memcpy((void *)to, from, bytes);
	return CUDA_SUCCESS;
}

static CUresult to_host(void *to, CUdeviceptr from, size_t bytes)
{
	if (!bytes)
		return CUDA_SUCCESS;
	if (!to || !memory_can_read(from, bytes))
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(to, (void *)from, bytes);
	return CUDA_SUCCESS;
}

static CUresult on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	if (!bytes)
		return CUDA_SUCCESS;
	if (!memory_can_read(from, bytes) || !memory_can_write(to, bytes))
		return CUDA_ERROR_INVALID_VALUE;
	memmove((void *)to, (void *)from, bytes);
	return CUDA_SUCCESS;
}

/* The address alone determines where memory is. */
static CUresult anywhere(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	if (memory_can_write(to, 1))
		return memory_can_read(from, 1) ? on_device(to, from, bytes) : to_device(to, (void *)from, bytes);
	return to_host((void *)to, from, bytes);
}

static CUresult fill(CUdeviceptr to, unsigned char value, size_t count)
{
	if (!count)
		return CUDA_SUCCESS;
	if (!memory_can_write(to, count))
		return CUDA_ERROR_INVALID_VALUE;
	memset((void *)to, value, count);
	return CUDA_SUCCESS;
}

static CUresult fill_words(CUdeviceptr to, unsigned int value, size_t count)
{
	if (to % sizeof value || (count && !memory_can_write(to, sizeof value * count)))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++)
		((uint32_t *)to)[i] = value;
	return CUDA_SUCCESS;
}

/* ---------------------------------------------------------------- pending copies */

static pthread_mutex_t queue = PTHREAD_MUTEX_INITIALIZER;
static int waiting_count;
static struct waiting {
	CUstream stream;
	bool in; /* to the device */
	CUdeviceptr device;
	void *host;
	size_t bytes;
} waiting[MAX_WAITING];

static CUresult finish_locked(CUstream stream)
{
	CUresult result = CUDA_SUCCESS;
	int left = 0;

	for (int i = 0; i < waiting_count; i++) {
		struct waiting *copy = &waiting[i];
		bool due = (uintptr_t)stream <= 2 || copy->stream == stream;

		if (!due)
			waiting[left++] = *copy;
		else if ((copy->in ? to_device(copy->device, copy->host, copy->bytes) :
				     to_host(copy->host, copy->device, copy->bytes)) != CUDA_SUCCESS)
			result = CUDA_ERROR_ILLEGAL_ADDRESS;
	}
	waiting_count = left;
	return result;
}

CUresult copies_finish(CUstream stream)
{
	CUresult result;

	pthread_mutex_lock(&queue);
	result = finish_locked(stream);
	pthread_mutex_unlock(&queue);
	return result;
}

void copies_forget_after_fork(void)
{
	pthread_mutex_init(&queue, NULL);
	waiting_count = 0;
}

/* Pageable memory is copied at once. */
static CUresult submit(struct waiting copy)
{
	CUresult result = CUDA_SUCCESS;

	if (!copy.bytes)
		return CUDA_SUCCESS;
	if (!(copy.in ? memory_can_write : memory_can_read)(copy.device, copy.bytes))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&queue);
	if (waiting_count == MAX_WAITING || !pinned_contains(copy.host, copy.bytes))
		result = finish_locked(copy.stream);
	if (pinned_contains(copy.host, copy.bytes) && waiting_count < MAX_WAITING)
		waiting[waiting_count++] = copy;
	else if (result == CUDA_SUCCESS)
		result =
			copy.in ? to_device(copy.device, copy.host, copy.bytes) : to_host(copy.host, copy.device, copy.bytes);
	pthread_mutex_unlock(&queue);
	return result;
}

/* ---------------------------------------------------------------- the calls */

/* A copy needs a context. A copy on the default stream waits for all others. An asynchronous one may fail by an
 * injected fault. */
#define COPY(...)                                                                                         \
	CALL(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : copies_finish(EVERY_STREAM);       \
	     if (result == CUDA_SUCCESS) result = __VA_ARGS__;)
#define COPY_ASYNC(stream, ...)                                                                           \
	CALL(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : (CUresult)fault_in_call("copy");   \
	     if (result == CUDA_SUCCESS) result = copies_finish(stream);                                  \
	     if (result == CUDA_SUCCESS) result = __VA_ARGS__;)
#define SUBMIT(...)                                                                                       \
	CALL(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : (CUresult)fault_in_call("copy");   \
	     if (result == CUDA_SUCCESS) result = submit((struct waiting)__VA_ARGS__);)

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
	COPY(to_device(to, from, bytes));
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
	COPY(to_host(to, from, bytes));
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	COPY(on_device(to, from, bytes));
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	COPY(anywhere(to, from, bytes));
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
	COPY(fill(to, value, count));
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count)
{
	COPY(fill_words(to, value, count));
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
	SUBMIT({.stream = stream, .in = true, .device = to, .host = (void *)(uintptr_t)from, .bytes = bytes});
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	SUBMIT({.stream = stream, .device = from, .host = to, .bytes = bytes});
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	COPY_ASYNC(stream, on_device(to, from, bytes));
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	COPY_ASYNC(stream, anywhere(to, from, bytes));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
	COPY_ASYNC(stream, fill(to, value, count));
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream)
{
	COPY_ASYNC(stream, fill_words(to, value, count));
}
