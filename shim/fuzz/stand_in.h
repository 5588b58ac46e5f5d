/* A stand-in for NCCL inside the target's process: it answers as the input says. */
#ifndef SNAPSHIM_FUZZ_STAND_IN_H
#define SNAPSHIM_FUZZ_STAND_IN_H

#include "input.h"
#include "nccl/types.h"

/* Bits: 1: the process has loaded no NCCL, unless it has used it; 2: creating fails; 4: what was created is in progress; 8: destroying fails;
 * 16: it does not say size and rank; 32: a fresh copy does not load. */
void stand_in_choose(unsigned int behaviour);
void stand_in_forget(void); /* after every communicator has ended */
void stand_in_take(struct input *input);

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t *out, ncclConfig_t *config);
ncclResult_t ncclCommShrink(ncclComm_t handle, int *excluded, int count, ncclComm_t *out, ncclConfig_t *config, int flags);
ncclResult_t ncclCommFinalize(ncclComm_t handle);
ncclResult_t ncclCommDestroy(ncclComm_t handle);
ncclResult_t ncclCommAbort(ncclComm_t handle);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclAllReduce(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
ncclResult_t ncclSend(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
ncclResult_t ncclRecv(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

#endif
