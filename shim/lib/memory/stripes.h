/* The stripes of one MEMORY_READY: the layout of the offloaded memory, the resources for copying, and the tasks that copy
 * it. */
#ifndef SNAPSHIM_MEMORY_STRIPES_H
#define SNAPSHIM_MEMORY_STRIPES_H

#include "workers.h"

struct stripes {
	unsigned int count;
	size_t slot_bytes;
	uint64_t devices;     /* that have blocks in the table, by bit */
	uint64_t entered;     /* devices whose primary context is retained, by bit */
	void *context[DEVICES_MAX]; /* in which each device's copies are made */
	bool holds; /* for HAND_OVER and TAKE_BACK: nothing is copied here */
	bool invalid;      /* one of those has ended, and with it its streams and slots */
};
extern struct stripes stripes;

/* layout.c: iterates over the chunks of one stripe, beginning with a cursor whose `skip` is the stripe's number. */
struct chunk {
	uint64_t address, bytes;
	int device;
};
struct cursor {
	size_t block;
	uint64_t chunk; /* of the block */
	uint64_t skip; /* chunks before the next one of this stripe */
};
bool next_chunk(struct cursor *cursor, struct chunk *chunk);
uint64_t stripe_bytes(unsigned int stripe); /* what copy_out would put there */

/* contexts.c: a lock for threads that create or release something in a context, and for those that end a context. */
bool contexts_hold(int64_t until_ns); /* false: a parked thread is ending one, or it takes too long */
void contexts_let_go(void);
void contexts_forget(void);

/* Tasks of workers. */
/* copy_resources.c */
int enter_devices(struct worker *worker); /* one worker's: finds contexts */
int prepare(struct worker *worker);   /* creates missing slots and streams */
int map_stripe(struct worker *worker);   /* never fails */
int clean_up(struct worker *worker);
int leave_devices(struct worker *worker); /* one worker's */
int enter(struct worker *worker, int device); /* makes its context current */
void stay_out_of_captures(void); /* the calling thread's calls */
void resources_forget(void);
/* rehearsal.c */
int rehearse(struct worker *worker); /* one worker's */
int rehearse_lock(struct worker *worker); /* one worker's: takes the driver's lock exclusively, on all devices in use */
int take_lock(struct worker *worker); /* the same in the current context */
/* streaming_copy.c */
void streaming_copy(char *to, const char *from, uint64_t bytes);
/* holding.c */
/* One worker's: sends descriptors of all blocks that are counted. 0: they are kept elsewhere, and may be released here. */
int hand_over(struct worker *worker);
/* One worker's: maps what is received. detach_all comes before it, and after it if it fails. */
int take_back(struct worker *worker);
int own_all(struct worker *worker); /* one worker's: replaces imported memory by memory of this process */
void holding_forget(void);
/* ipc_export.c */
int ipc_offer_all(struct worker *worker); /* one worker's: exports again what is not offered */
/* copying.c */
int drop_freed(struct worker *worker); /* one worker's */
int copy_out(struct worker *worker);
int copy_in(struct worker *worker);
int detach_all(struct worker *worker); /* releases the physical memory */
int attach_all(struct worker *worker); /* creates and maps it again; if one worker fails, detach_all has to follow */

#endif
