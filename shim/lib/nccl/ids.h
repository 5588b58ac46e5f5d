/* Unique ids that this process has made: NCCL has a thread and a socket for one that is not used yet. */
#ifndef SNAPSHIM_NCCL_IDS_H
#define SNAPSHIM_NCCL_IDS_H

#include "types.h"

void id_used(const ncclUniqueId *ids, size_t count);
/* How many of the last ones made here were never used here. */
int ids_unused(void);

#endif
