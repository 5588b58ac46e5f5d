/* The stripe files: the daemon sends their descriptors over a socket pair that this process creates. */
#ifndef SNAPSHIM_MEMORY_HANDOVER_H
#define SNAPSHIM_MEMORY_HANDOVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

/* 0 or an errno, and the reason in the mailbox. */
int handover_open(int *theirs, uint64_t *inode); /* the daemon's socket, of which it takes a copy */
int handover_receive(unsigned int wanted, int64_t until_ns);
void handover_is_taken(void); /* the daemon has its copy: from now on its death is noticed here */

/* At most SNAPSHIM_STRIPES_MAX descriptors with each message. They do not wait: EAGAIN. */
int handover_send(const void *data, size_t bytes, const int *descriptors, unsigned int count);
/* The caller closes them; the job is parked, so that it forks none. As many records as descriptors. */
int handover_take(struct snapshim_held_block *records, int *descriptors, unsigned int *count);
int handover_answer(void); /* one byte of the daemon */

bool handover_is_open(void);
int handover_file(unsigned int stripe);
bool handover_is_ours(unsigned int stripe); /* whether the descriptor still refers to the file */
void handover_close(void); /* all open sockets and files */

#endif
