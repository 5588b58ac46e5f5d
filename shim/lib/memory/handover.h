/* The stripe files: their descriptors come from the daemon, over a pair of sockets that is the process's own. */
#ifndef SNAPSHIM_MEMORY_HANDOVER_H
#define SNAPSHIM_MEMORY_HANDOVER_H

#include <stdbool.h>
#include <stdint.h>

/* 0 or an errno, and the reason in the mailbox. */
int handover_open(int *theirs); /* the daemon's socket, of which it takes a copy */
int handover_receive(unsigned int wanted, int64_t until_ns);

bool handover_is_open(void);
int handover_file(unsigned int stripe);
bool handover_is_ours(unsigned int stripe); /* whether that number is still the file */
void handover_close(void); /* sockets and files, whatever there is */

#endif
