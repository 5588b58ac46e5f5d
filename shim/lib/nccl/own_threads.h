/* Threads that are inside a library's code but did not call it through the shim: NCCL's own. */
#ifndef SNAPSHIM_NCCL_OWN_THREADS_H
#define SNAPSHIM_NCCL_OWN_THREADS_H

#include <stdbool.h>
#include <stdint.h>

struct nccl_instance;

/* How many threads have an address of the library's code on their stacks. Threads that run at that moment and cannot be
 * inspected are added to `unseen`. Threads that call NCCL through the shim are excluded: the gate tracks them. */
int threads_inside(const struct nccl_instance *library, int *unseen);

/* The same, without threads that another library started: what they have on their stacks are remains of earlier calls, such as
 * loading the library, or their own calls past the shim, for which NCCL has threads of its own as well. */
int threads_started_by(const struct nccl_instance *library, int *unseen);

/* Whether a thread of this process has not ended yet, or cannot be inspected. */
bool thread_exists(int tid);

#endif
