/* The driver's calls that copy and fill. Each is done when it returns, also those that need not be. */
#include <string.h>

#include "call.h"
#include "faults.h"
#include "memory.h"

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

/* Addresses alone say what is where. */
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

/* A copy needs a context, and an asynchronous one may go wrong as the faults say. */
#define COPY(...)                                                                                 \
	CALL(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;              \
	     if (result == CUDA_SUCCESS) result = __VA_ARGS__;)
#define COPY_ASYNC(...)                                                                           \
	CALL(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : (CUresult)fault_in_call("copy"); \
	     if (result == CUDA_SUCCESS) result = __VA_ARGS__;)

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
	(void)stream;
	COPY_ASYNC(to_device(to, from, bytes));
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	(void)stream;
	COPY_ASYNC(to_host(to, from, bytes));
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	(void)stream;
	COPY_ASYNC(on_device(to, from, bytes));
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
	(void)stream;
	COPY_ASYNC(anywhere(to, from, bytes));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
	(void)stream;
	COPY_ASYNC(fill(to, value, count));
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream)
{
	(void)stream;
	COPY_ASYNC(fill_words(to, value, count));
}
