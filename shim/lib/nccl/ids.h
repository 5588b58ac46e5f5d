/* Unique ids that this process has created: NCCL keeps a thread and a socket for each until it is used. */
#ifndef SNAPSHIM_NCCL_IDS_H
#define SNAPSHIM_NCCL_IDS_H

#include "types.h"

void id_made(const ncclUniqueId *id);
void id_used(const ncclUniqueId *ids, size_t count);
/* How many were not used in this process. */
int ids_unused(void);

#endif
