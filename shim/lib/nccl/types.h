/* NCCL's binary interface as far as the shim needs it: numbers and layouts that are the same from 2.18 on. */
#ifndef SNAPSHIM_NCCL_TYPES_H
#define SNAPSHIM_NCCL_TYPES_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
	ncclSuccess = 0,
	ncclUnhandledCudaError = 1,
	ncclSystemError = 2,
	ncclInternalError = 3,
	ncclInvalidArgument = 4,
	ncclInvalidUsage = 5,
	ncclRemoteError = 6,
	ncclInProgress = 7,
} ncclResult_t;

enum { ncclSum = 0, FIRST_USER_REDOP = 5 };
enum { ncclInt8 = 0, ncclInt32 = 2, ncclFloat16 = 6, ncclBfloat16 = 9 };
enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };
enum { SPLIT_NO_COLOR = -1 };

typedef struct ncclComm *ncclComm_t;

typedef struct {
	char internal[128];
} ncclUniqueId;

/* The part of ncclConfig_t that 2.18 has. Later versions only append: `size` is how much the caller filled. */
typedef struct {
	size_t size;
	unsigned int magic, version;
	int blocking, cga_cluster_size, min_ctas, max_ctas;
	const char *net_name;
	int split_share, traffic_class; /* traffic_class: since 2.26 */
	const char *comm_name;  /* since 2.27 */
} ncclConfig_t;

/* ncclCollConfig_t up to its string (2.32). */
typedef struct {
	size_t size;
	unsigned int magic, version;
	void *ext;
	int min_ctas, max_ctas, nvls_ctas, cga_cluster_size;
	const char *algorithms;
} ncclCollConfig_t;

typedef struct {
	int ranks, rank, stride;
} ncclTeam_t; /* returned and passed by value */

typedef struct {
	int operations, peer, signal, context;
} ncclWaitSignalDesc_t;

#endif
