/* Threads that are inside a library's code but did not call it through the shim: NCCL's own. */
#ifndef SNAPSHIM_NCCL_OWN_THREADS_H
#define SNAPSHIM_NCCL_OWN_THREADS_H

#include <stdbool.h>
#include <stdint.h>

/* How many threads have a return address between the two on their stacks. Threads that run at that moment and cannot be
 * inspected are added to `unseen`. Threads that call NCCL through the shim are excluded: the gate tracks them. */
int threads_inside(uint64_t from, uint64_t to, int *unseen);

/* Whether a thread of this process has not ended yet, or cannot be inspected. */
bool thread_exists(int tid);

#endif
