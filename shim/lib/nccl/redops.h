/* User reductions (ncclRedOpCreatePreMulSum), which NCCL numbers per real communicator. */
#ifndef SNAPSHIM_NCCL_REDOPS_H
#define SNAPSHIM_NCCL_REDOPS_H

#include "communicators.h"

/* The word to pass for the reduction `op` on the real communicator. Creates the reduction there if necessary. */
uint64_t redop_real(uint64_t op, struct nccl_comm *comm, struct nccl_instance *instance);
/* Destroys the real ones of a communicator; the application's numbers stay. */
void redops_detach(const struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance);
/* The communicator is gone. */
void redops_forget(const struct nccl_comm *comm);

#endif
