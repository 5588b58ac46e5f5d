/* Faults that a test injects. */
#ifndef FAKE_NCCL_FAULTS_H
#define FAKE_NCCL_FAULTS_H

#include "nccl_abi.h"

/* Executes the fault at this point. Returns ncclSuccess if there is none, or if a hang was cancelled. A hang ends with
 * ncclInternalError when `comm` (may be NULL) is stopped. Rank -1: the rank is not yet known. */
ncclResult_t fault_at(const char *point, int rank, const struct ncclComm *comm);
/* The same at a point "name.run": while the operation runs, not when it is launched. */
ncclResult_t fault_running(const char *name, int rank, const struct ncclComm *comm);

#endif
