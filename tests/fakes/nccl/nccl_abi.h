/* The part of NCCL's binary interface that the fake supports: numbers, layouts and prototypes, nothing else.
 *
 * Invariant: a program compiled against NCCL's own header can be linked or preloaded with the fake, so every number and
 * every offset here is NCCL's. Streams are opaque keys, so cudaStream_t is a plain pointer and no CUDA is needed.
 */
#ifndef FAKE_NCCL_ABI_H
#define FAKE_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

/* The version whose symbols are built; the environment variable FAKE_NCCL_VERSION changes only the result of
 * ncclGetVersion. */
#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22809
#endif

#define FAKE_EXPORT __attribute__((visibility("default")))

#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_SIM_INFO_MAGIC 0x74685283u
#define NCCL_SPLIT_NOCOLOR (-1)
#define NCCL_SHRINK_DEFAULT 0
#define NCCL_SHRINK_ABORT 1

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef void *cudaStream_t;

typedef struct {
	char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
	ncclSuccess = 0,
	ncclUnhandledCudaError = 1,
	ncclSystemError = 2,
	ncclInternalError = 3,
	ncclInvalidArgument = 4,
	ncclInvalidUsage = 5,
	ncclRemoteError = 6,
	ncclInProgress = 7,
	ncclNumResults = 8
} ncclResult_t;

typedef enum {
	ncclSum = 0,
	ncclProd = 1,
	ncclMax = 2,
	ncclMin = 3,
	ncclAvg = 4,
	ncclNumOps = 5,
	ncclMaxRedOp = INT_MAX
} ncclRedOp_t;

typedef enum {
	ncclInt8 = 0,
	ncclUint8 = 1,
	ncclInt32 = 2,
	ncclUint32 = 3,
	ncclInt64 = 4,
	ncclUint64 = 5,
	ncclFloat16 = 6,
	ncclFloat32 = 7,
	ncclFloat64 = 8,
	ncclBfloat16 = 9,
	ncclFloat8e4m3 = 10,
	ncclFloat8e5m2 = 11,
	ncclNumTypes = 12
} ncclDataType_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

/* Grows with every version; `size` says how much of it the caller's version has, and nothing beyond it may be read. */
typedef struct {
	size_t size;
	unsigned int magic;
	unsigned int version;
	int blocking;
	int cgaClusterSize;
	int minCTAs;
	int maxCTAs;
	const char *netName;
	int splitShare;
	int trafficClass;
	const char *commName;
	int collnetEnable;
	int CTAPolicy;
	int shrinkShare;
	int nvlsCTAs;
	int nChannelsPerNetPeer;
	int nvlinkCentricSched;
} ncclConfig_t;

typedef struct {
	size_t size;
	unsigned int magic;
	unsigned int version;
	float estimatedTime;
} ncclSimInfo_t;

FAKE_EXPORT ncclResult_t ncclGetVersion(int *version);
FAKE_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
FAKE_EXPORT const char *ncclGetErrorString(ncclResult_t result);
FAKE_EXPORT const char *ncclGetLastError(ncclComm_t comm);

FAKE_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank);
FAKE_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
						ncclConfig_t *config);
FAKE_EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devices);
FAKE_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config);
FAKE_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm);
FAKE_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm);
FAKE_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm);
FAKE_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state);
FAKE_EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
FAKE_EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
FAKE_EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);

FAKE_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
						  ncclScalarResidence_t residence, ncclComm_t comm);
FAKE_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

FAKE_EXPORT ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
				    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
				   cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
				       ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
				       ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
					   ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
				       ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
				  cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
				  cudaStream_t stream);

FAKE_EXPORT ncclResult_t ncclGroupStart(void);
FAKE_EXPORT ncclResult_t ncclGroupEnd(void);

#if FAKE_NCCL_VERSION >= 21900
FAKE_EXPORT ncclResult_t ncclMemAlloc(void **memory, size_t bytes);
FAKE_EXPORT ncclResult_t ncclMemFree(void *memory);
FAKE_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle);
FAKE_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
#endif
#if FAKE_NCCL_VERSION >= 22200
FAKE_EXPORT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info);
#endif
#if FAKE_NCCL_VERSION >= 22300
FAKE_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int nids, ncclUniqueId *ids,
						  ncclConfig_t *config);
#endif
#if FAKE_NCCL_VERSION >= 22700
FAKE_EXPORT ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int nexcluded, ncclComm_t *child,
					ncclConfig_t *config, int flags);
FAKE_EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window, int flags);
FAKE_EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);
#endif
#if FAKE_NCCL_VERSION >= 22800
FAKE_EXPORT ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
				      ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
				    ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
				     ncclComm_t comm, cudaStream_t stream);
FAKE_EXPORT ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *requirements, void *device_comm);
FAKE_EXPORT ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const void *device_comm);
#endif

#endif
