/* Buffers that the application registered, and memory that it allocated with NCCL. */
#ifndef SNAPSHIM_NCCL_REGISTRATIONS_H
#define SNAPSHIM_NCCL_REGISTRATIONS_H

#include "communicators.h"

/* Removes the real registrations; the application's handles stay. Call both functions with the lock. */
void registrations_detach(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance);
/* Registers what has no real one yet. */
ncclResult_t registrations_attach(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance);
/* How many allocations of ncclMemAlloc were not freed. */
int allocations(void);

#endif
