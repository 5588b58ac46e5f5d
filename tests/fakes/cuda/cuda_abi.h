/* The binary interface of the CUDA driver: types, error numbers, and the layouts of the checkpoint calls.
 *
 * Written from the behaviour of the calls, not copied from a header. It contains only what the fake supports.
 */
#ifndef FAKE_CUDA_ABI_H
#define FAKE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* X(number, name, text) */
#define CUDA_ERRORS(X)                                                                    \
	X(0, CUDA_SUCCESS, "no error")                                                    \
	X(1, CUDA_ERROR_INVALID_VALUE, "invalid argument")                                \
	X(2, CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                   \
	X(3, CUDA_ERROR_NOT_INITIALIZED, "initialization error")                          \
	X(4, CUDA_ERROR_DEINITIALIZED, "driver shutting down")                            \
	X(34, CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")                   \
	X(46, CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable") \
	X(100, CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                \
	X(101, CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                       \
	X(200, CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                \
	X(201, CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                      \
	X(217, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices") \
	X(304, CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS") \
	X(400, CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                      \
	X(401, CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state") \
	X(500, CUDA_ERROR_NOT_FOUND, "named symbol not found")                            \
	X(600, CUDA_ERROR_NOT_READY, "device not ready")                                  \
	X(700, CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")    \
	X(704, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled")  \
	X(705, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled")    \
	X(712, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped") \
	X(713, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region") \
	X(719, CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                    \
	X(800, CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                       \
	X(801, CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                       \
	X(802, CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")                 \
	X(999, CUDA_ERROR_UNKNOWN, "unknown error")

#define AS_ENUM(number, name, text) name = number,
typedef enum { CUDA_ERRORS(AS_ENUM) } CUresult;
#undef AS_ENUM

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct fake_context *CUcontext;
typedef struct fake_stream *CUstream;
typedef struct fake_event *CUevent;
typedef struct fake_module *CUmodule;
typedef struct fake_function *CUfunction;

typedef struct {
	uint8_t bytes[16];
} CUuuid;

typedef struct {
	char reserved[64];
} CUipcMemHandle;

typedef uint64_t CUmemGenericAllocationHandle;

enum { LOCATION_DEVICE = 1, ALLOCATION_PINNED = 1, HANDLE_FILE = 1 };
enum { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

typedef struct {
	int type;
	int id;
} CUmemLocation;

typedef struct {
	int type;
	int requestedHandleTypes;
	CUmemLocation location;
	void *win32HandleMetaData;
	struct {
		unsigned char compressionType;
		unsigned char gpuDirectRDMACapable;
		unsigned short usage;
		unsigned char reserved[4];
	} allocFlags;
} CUmemAllocationProp;

typedef struct {
	CUmemLocation location;
	int flags;
} CUmemAccessDesc;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "the driver's layout");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "the driver's layout");

/* The supported attributes of cuDeviceGetAttribute. */
enum {
	DEVICE_MAX_THREADS_PER_BLOCK = 1,
	DEVICE_WARP_SIZE = 10,
	DEVICE_MULTIPROCESSOR_COUNT = 16,
	DEVICE_INTEGRATED = 18,
	DEVICE_PCI_BUS_ID = 33,
	DEVICE_PCI_DEVICE_ID = 34,
	DEVICE_UNIFIED_ADDRESSING = 41,
	DEVICE_PCI_DOMAIN_ID = 50,
	DEVICE_COMPUTE_CAPABILITY_MAJOR = 75,
	DEVICE_COMPUTE_CAPABILITY_MINOR = 76,
	DEVICE_MANAGED_MEMORY = 83,
	DEVICE_VIRTUAL_MEMORY_SUPPORTED = 102,
	DEVICE_HANDLE_FILE_SUPPORTED = 103,
	DEVICE_RDMA_WITH_VIRTUAL_MEMORY_SUPPORTED = 110,
	DEVICE_MEMORY_POOLS_SUPPORTED = 115,
	DEVICE_RDMA_SUPPORTED = 116,
	DEVICE_DMA_BUF_SUPPORTED = 124,
	DEVICE_HANDLE_FABRIC_SUPPORTED = 128
};

/* The supported attributes of cuPointerGetAttribute. */
enum {
	POINTER_CONTEXT = 1,
	POINTER_MEMORY_TYPE = 2,
	POINTER_DEVICE_POINTER = 3,
	POINTER_IS_MANAGED = 8,
	POINTER_DEVICE_ORDINAL = 9,
	POINTER_IS_IPC_CAPABLE = 10,
	POINTER_RANGE_START = 11,
	POINTER_RANGE_BYTES = 12,
	POINTER_MAPPED = 13,
	POINTER_HANDLE_TYPES = 14,
	POINTER_IS_RDMA_CAPABLE = 15
};

typedef enum { PROCESS_RUNNING, PROCESS_LOCKED, PROCESS_CHECKPOINTED, PROCESS_FAILED } CUprocessState;

typedef struct {
	unsigned int timeoutMs;
	unsigned int reserved0;
	uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
	CUuuid oldUuid;
	CUuuid newUuid;
} CUcheckpointGpuPair;

typedef struct {
	CUcheckpointGpuPair *gpuPairs; /* from r580; before that reserved, like the count */
	unsigned int gpuPairsCount;
	char reserved[52];
} CUcheckpointRestoreArgs;

typedef struct {
	uint64_t reserved[8];
} CUcheckpointPlainArgs; /* of checkpoint and of unlock */

_Static_assert(sizeof(CUcheckpointLockArgs) == 64, "the driver's layout");
_Static_assert(sizeof(CUcheckpointRestoreArgs) == 64, "the driver's layout");
_Static_assert(sizeof(CUcheckpointPlainArgs) == 64, "the driver's layout");
_Static_assert(sizeof(CUcheckpointGpuPair) == 32, "the driver's layout");

const char *error_name(int number);  /* NULL: no such error */
const char *error_text(int number); /* NULL: no such error */
int error_number(const char *name);  /* a name or a decimal number; CUDA_ERROR_UNKNOWN for anything else */

#endif
