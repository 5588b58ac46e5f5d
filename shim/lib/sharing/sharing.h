/* What only libsnapshim-shared.so does: device memory that processes share (CUDA IPC) moves with a rank. */
#ifndef SNAPSHIM_SHARING_SHARING_H
#define SNAPSHIM_SHARING_SHARING_H

#include <stdbool.h>
#include <stdint.h>

/* guard.c */
bool sharing_moves(void); /* false in the other libraries */
/* Whether a process is in the same cgroup as this one, and so in the same rank. Not known: false. */
bool sharing_is_inside(int pid);
/* moves.c: SNAPSHIM_MEMORY_IPC_… */
int sharing_dispatch(uint32_t command, int64_t until_ns);
/* events.c: in a forked child */
void sharing_forget(void);

#endif
