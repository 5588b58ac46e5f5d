/* The part of the CUDA driver API that the memory files call, with the names and layouts of its own header. */
#ifndef SNAPSHIM_MEMORY_DRIVER_H
#define SNAPSHIM_MEMORY_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#define CUDA_INVALID_VALUE 1
#define CUDA_OUT_OF_MEMORY 2
#define CUDA_NOT_FOUND 500
#define CUDA_NOT_PERMITTED 800
#define CUDA_NOT_SUPPORTED 801
#define RUNTIME_NOT_FOUND 302 /* cudaErrorSharedObjectSymbolNotFound */

#define ON_DEVICE 1	      /* CU_MEM_LOCATION_TYPE_DEVICE */
#define PINNED 1	      /* CU_MEM_ALLOCATION_TYPE_PINNED */
#define READ_AND_WRITE 3      /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
#define MINIMUM_GRANULARITY 0 /* CU_MEM_ALLOC_GRANULARITY_MINIMUM */
#define POSIX_DESCRIPTOR 1    /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
#define DESCRIPTORS_SUPPORTED 103 /* CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
#define RDMA_SUPPORTED 110    /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
#define PORTABLE 1	      /* CU_MEMHOSTALLOC_PORTABLE */
#define NON_BLOCKING 1	      /* CU_STREAM_NON_BLOCKING */
#define RELAXED 2	      /* CU_STREAM_CAPTURE_MODE_RELAXED */

struct cuda_location {
	int32_t type, id;
};

struct cuda_property { /* CUmemAllocationProp */
	int32_t type, handle_types;
	struct cuda_location location;
	void *windows;
	uint8_t compression, rdma;
	uint16_t usage;
	uint8_t reserved[4];
};

struct cuda_access { /* CUmemAccessDesc */
	struct cuda_location location;
	int32_t flags;
};

_Static_assert(sizeof(struct cuda_property) == 32, "the driver's layout");
_Static_assert(sizeof(struct cuda_access) == 12, "the driver's layout");

#define DRIVER_NEEDED(X)                                                                           \
	X(cuCtxGetCurrent, (void **))                                                              \
	X(cuCtxSetCurrent, (void *))                                                               \
	X(cuCtxGetDevice, (int *))                                                                 \
	X(cuCtxSynchronize, (void))                                                                \
	X(cuDeviceGetAttribute, (int *, int, int))                                                 \
	X(cuMemGetAllocationGranularity, (size_t *, const struct cuda_property *, int))            \
	X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))         \
	X(cuMemAddressFree, (uint64_t, size_t))                                                    \
	X(cuMemCreate, (uint64_t *, size_t, const struct cuda_property *, unsigned long long))     \
	X(cuMemRelease, (uint64_t))                                                                \
	X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))                      \
	X(cuMemUnmap, (uint64_t, size_t))                                                          \
	X(cuMemSetAccess, (uint64_t, size_t, const struct cuda_access *, size_t))                  \
	X(cuMemHostAlloc, (void **, size_t, unsigned int))                                         \
	X(cuMemFreeHost, (void *))                                                                 \
	X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *))                                \
	X(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *))                          \
	X(cuStreamCreate, (void **, unsigned int))                                                 \
	X(cuStreamSynchronize, (void *))                                                           \
	X(cuStreamDestroy_v2, (void *))                                                            \
	X(cuMemAlloc_v2, (uint64_t *, size_t))                                                     \
	X(cuMemFree_v2, (uint64_t))

/* NULL if the driver lacks them. */
#define DRIVER_USEFUL(X)                                                                           \
	X(cuMemExportToShareableHandle, (void *, uint64_t, int, unsigned long long))               \
	X(cuMemImportFromShareableHandle, (uint64_t *, void *, int))                               \
	X(cuMemRetainAllocationHandle, (uint64_t *, void *))                                       \
	X(cuMemcpyDtoDAsync_v2, (uint64_t, uint64_t, size_t, void *))                              \
	X(cuDeviceCanAccessPeer, (int *, int, int))                                                \
	X(cuDevicePrimaryCtxGetState, (int, unsigned int *, int *))                                \
	X(cuDevicePrimaryCtxRetain, (void **, int))                                                \
	X(cuDevicePrimaryCtxRelease_v2, (int))                                                     \
	X(cuThreadExchangeStreamCaptureMode, (int *))                                              \
	X(cuStreamIsCapturing, (void *, int *))                                                    \
	X(cuEventCreate, (void **, unsigned int))                                                  \
	X(cuEventSynchronize, (void *))                                                            \
	X(cuEventDestroy_v2, (void *))

struct driver {
#define X(name, types) int(*name) types;
	DRIVER_NEEDED(X)
	DRIVER_USEFUL(X)
#undef X
};

/* NULL: the process has no driver yet, or one that lacks a required function. Takes no lock once it has been found. */
const struct driver *driver(void);

#endif
