/* Threads that are inside a library's code and did not come through the shim: NCCL's own. */
#ifndef SNAPSHIM_NCCL_OWN_THREADS_H
#define SNAPSHIM_NCCL_OWN_THREADS_H

#include <stdint.h>

/* How many threads have a return address between the two on their stacks; what cannot be looked at counts as well. Threads
 * that call NCCL through the shim are left out: the gate knows them. */
int threads_inside(uint64_t from, uint64_t to);

#endif
