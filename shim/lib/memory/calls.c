/* The interposed allocation functions of the runtime and the driver. A program may allocate with one and free with the
 * other, so all use the same table. */
#define _GNU_SOURCE
#include "lookup.h"
#include "memory.h"

SNAPSHIM_EXPORT int cudaMalloc(void **memory, size_t bytes);
int cudaMalloc(void **memory, size_t bytes)
{
	int (*real)(void **, size_t) = REAL_FUNCTION(cudaMalloc, CUDA_RUNTIME, (void **, size_t));

	if (!real)
		return RUNTIME_NOT_FOUND;
	if (backing_takes(bytes) && backing_serves(__builtin_return_address(0)) &&
	    enter_runtime_device(__builtin_return_address(0)) && backing_allocate((uint64_t *)memory, bytes))
		return 0;
	return PASS_ON(real(memory, bytes));
}

SNAPSHIM_EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes);
int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
	int (*real)(uint64_t *, size_t) = REAL_FUNCTION(cuMemAlloc_v2, CUDA_DRIVER, (uint64_t *, size_t));

	if (!real)
		return CUDA_NOT_FOUND;
	return backing_allocate(address, bytes) ? 0 : PASS_ON(real(address, bytes));
}

#define FREE(name, file, not_found, parameters, arguments, address)       \
	SNAPSHIM_EXPORT int name parameters;                              \
	int name parameters                                               \
	{                                                                 \
		int(*real) parameters = REAL_FUNCTION(name, file, parameters);     \
                                                                          \
		if (!real)                                                \
			return not_found;                                 \
		return backing_free(address) ? 0 : PASS_ON(real arguments); \
	}

FREE(cudaFree, CUDA_RUNTIME, RUNTIME_NOT_FOUND, (void *memory), (memory), (uint64_t)memory)
FREE(cudaFreeAsync, CUDA_RUNTIME, RUNTIME_NOT_FOUND, (void *memory, void *stream), (memory, stream), (uint64_t)memory)
FREE(cudaFreeAsync_ptsz, CUDA_RUNTIME, RUNTIME_NOT_FOUND, (void *memory, void *stream), (memory, stream), (uint64_t)memory)
FREE(cuMemFree_v2, CUDA_DRIVER, CUDA_NOT_FOUND, (uint64_t address), (address), address)
FREE(cuMemFreeAsync, CUDA_DRIVER, CUDA_NOT_FOUND, (uint64_t address, void *stream), (address, stream), address)
FREE(cuMemFreeAsync_ptsz, CUDA_DRIVER, CUDA_NOT_FOUND, (uint64_t address, void *stream), (address, stream), address)

static bool is_on(const struct block *block, const void *device)
{
	return block->device == *(const int *)device;
}

static bool is_in(const struct block *block, const void *context)
{
	return block->context == context;
}

/* CUDA releases the memory of a context that ends, but the memory that we back belongs to no context. */
#define END_CONTEXT(call, device, context)          \
	({                                          \
		int ended_;                         \
                                                    \
		context_ends(device, context);      \
		ended_ = PASS_ON(call);             \
		context_has_ended();                \
		ended_;                             \
	})

SNAPSHIM_EXPORT int cudaDeviceReset(void);
int cudaDeviceReset(void)
{
	int (*real)(void) = REAL_FUNCTION(cudaDeviceReset, CUDA_RUNTIME, (void));
	int (*get_device)(int *) = REAL_FUNCTION(cudaGetDevice, CUDA_RUNTIME, (int *));
	int device;

	if (!real)
		return RUNTIME_NOT_FOUND;
	if (!called_by_program() || !get_device || PASS_ON(get_device(&device)) != 0)
		return PASS_ON(real());
	backing_drop(is_on, &device);
	return END_CONTEXT(real(), device, NULL);
}

SNAPSHIM_EXPORT int cuDevicePrimaryCtxReset_v2(int device);
int cuDevicePrimaryCtxReset_v2(int device)
{
	int (*real)(int) = REAL_FUNCTION(cuDevicePrimaryCtxReset_v2, CUDA_DRIVER, (int));

	if (!real)
		return CUDA_NOT_FOUND;
	if (!called_by_program())
		return PASS_ON(real(device));
	backing_drop(is_on, &device);
	return END_CONTEXT(real(device), device, NULL);
}

SNAPSHIM_EXPORT int cuCtxDestroy_v2(void *context);
int cuCtxDestroy_v2(void *context)
{
	int (*real)(void *) = REAL_FUNCTION(cuCtxDestroy_v2, CUDA_DRIVER, (void *));

	if (!real)
		return CUDA_NOT_FOUND;
	if (!called_by_program())
		return PASS_ON(real(context));
	backing_drop(is_in, context);
	return END_CONTEXT(real(context), -1, context);
}
