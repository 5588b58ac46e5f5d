/* Buffers that the application registered, and memory it had from NCCL. */
#ifndef SNAPSHIM_NCCL_REGISTRATIONS_H
#define SNAPSHIM_NCCL_REGISTRATIONS_H

#include "communicators.h"

/* Takes the real registrations back; the application's handles stay. Both with the lock. */
void registrations_detach(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance);
/* Registers what has no real one yet. */
ncclResult_t registrations_attach(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance);
/* ncclMemAlloc's that were not freed. */
int allocations(void);

#endif
