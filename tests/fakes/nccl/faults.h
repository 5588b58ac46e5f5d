/* Faults that a test asks for. */
#ifndef FAKE_NCCL_FAULTS_H
#define FAKE_NCCL_FAULTS_H

#include "nccl_abi.h"

/* Does what is asked for at this point: ncclSuccess when nothing is, or when a hang was called off. A hang ends with
 * ncclInternalError when `comm` (may be NULL) is stopped. Rank -1: no rank is known yet. */
ncclResult_t fault_at(const char *point, int rank, const struct ncclComm *comm);
/* The same at a point "name.run": while the operation runs, not when it is launched. */
ncclResult_t fault_running(const char *name, int rank, const struct ncclComm *comm);

#endif
