/* The memory of other processes that is mapped here: ipc_import.c opens and closes handles, sharing/moves.c unmaps and maps
 * it. */
#ifndef SNAPSHIM_MEMORY_IPC_OPENED_H
#define SNAPSHIM_MEMORY_IPC_OPENED_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* One mapping. Records are reused. */
struct opened {
	uint64_t server, number;
	uint64_t address, bytes; /* address 0: the record is free */
	uint64_t access; /* the devices that may use it, by bit */
	void *context; /* in which it was opened */
	uint32_t times; /* 0: closed while something was captured, to be unmapped later */
	bool away; /* unmapped for a move; the address is still reserved */
	struct opened *next;
};

extern pthread_mutex_t ipc_opening;
extern struct opened *ipc_opened;

/* Under the lock. */
void ipc_forget_opened(struct opened *record); /* it is unmapped, and its address free */

#endif
