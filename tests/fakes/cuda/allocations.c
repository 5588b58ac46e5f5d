/* The driver's calls for device memory that the program does not map itself, and for the attributes of an address. */
#include <string.h>

#include "call.h"
#include "copies.h"
#include "memory.h"
#include "virtual.h"

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
	CALL(int gpu = current_gpu(); result = gpu >= 0 ? memory_allocate(gpu, bytes, address) : CUDA_ERROR_INVALID_CONTEXT;);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
	(void)stream;
	return cuMemAlloc_v2(address, bytes);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
	(void)flags;
	CALL(result = current_gpu() >= 0 ? memory_allocate_managed(bytes, address) : CUDA_ERROR_INVALID_CONTEXT;);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
	CALL(copies_finish(EVERY_STREAM); result = memory_free(address););
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
	(void)stream;
	return cuMemFree_v2(address);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
	uint64_t room = 0, total = 0;

	CALL(int gpu = current_gpu(); result = gpu >= 0 ? memory_room(gpu, &room, &total) : CUDA_ERROR_INVALID_CONTEXT;
	     *free_bytes = room; *total_bytes = total;);
}

/* ---------------------------------------------------------------- attributes of an address */

struct range {
	CUdeviceptr base;
	uint64_t bytes;
	int gpu; /* -1: managed */
	bool mapped; /* by the program itself: it belongs to no context and has no IPC handle */
	CUmemAllocationProp prop;
};

static bool find(CUdeviceptr address, struct range *range)
{
	memset(range, 0, sizeof *range);
	if (memory_range(address, &range->base, &range->bytes, &range->gpu))
		return true;
	range->mapped = virtual_range(address, &range->base, &range->bytes, &range->prop);
	range->gpu = range->prop.location.id;
	return range->mapped;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
	struct range range;

	CALL(if (find(address, &range)) {
		if (base)
			*base = range.base;
		if (bytes)
			*bytes = range.bytes;
	} else result = CUDA_ERROR_NOT_FOUND;);
}

static CUresult describe(const struct range *range, int attribute, CUdeviceptr address, void *into)
{
	int number;

	switch (attribute) {
	case POINTER_CONTEXT:
		*(CUcontext *)into = range->mapped ? NULL : context_of(range->gpu);
		return CUDA_SUCCESS;
	case POINTER_DEVICE_POINTER:
		*(CUdeviceptr *)into = address;
		return CUDA_SUCCESS;
	case POINTER_RANGE_START:
		*(CUdeviceptr *)into = range->base;
		return CUDA_SUCCESS;
	case POINTER_RANGE_BYTES:
		*(size_t *)into = range->bytes;
		return CUDA_SUCCESS;
	case POINTER_HANDLE_TYPES:
		*(uint64_t *)into = (uint64_t)range->prop.requestedHandleTypes;
		return CUDA_SUCCESS;
	case POINTER_IS_MANAGED:
		*(unsigned char *)into = range->gpu < 0;
		return CUDA_SUCCESS;
	case POINTER_IS_IPC_CAPABLE:
		*(unsigned char *)into = range->gpu >= 0 && !range->mapped;
		return CUDA_SUCCESS;
	case POINTER_MAPPED:
		*(unsigned char *)into = 1;
		return CUDA_SUCCESS;
	case POINTER_IS_RDMA_CAPABLE:
		*(unsigned char *)into = range->mapped ? range->prop.allocFlags.gpuDirectRDMACapable : range->gpu >= 0;
		return CUDA_SUCCESS;
	case POINTER_MEMORY_TYPE:
		number = 2; /* device */
		break;
	case POINTER_DEVICE_ORDINAL:
		number = range->gpu < 0 ? 0 : range->gpu;
		break;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	memcpy(into, &number, sizeof number);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *into, int attribute, CUdeviceptr address)
{
	struct range range;

	CALL(result = into && find(address, &range) ? describe(&range, attribute, address, into) : CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
	struct range range;

	CALL(memset(handle, 0, sizeof *handle); memcpy(handle, &address, sizeof address);
	     if (!find(address, &range) || range.mapped || range.gpu < 0) result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
	(void)address, (void)handle, (void)flags;
	CALL(result = CUDA_ERROR_NOT_SUPPORTED;);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
	(void)address;
	CALL(result = CUDA_ERROR_INVALID_VALUE;); /* none was opened */
}
