/* The stripes of one MEMORY_READY: where each byte of the offloaded memory is, what it is copied with, and the tasks that
 * copy it. */
#ifndef SNAPSHIM_MEMORY_STRIPES_H
#define SNAPSHIM_MEMORY_STRIPES_H

#include "workers.h"

struct stripes {
	unsigned int count;
	size_t slot_bytes;
	uint64_t devices;     /* that have blocks in the table, by bit */
	uint64_t entered;     /* devices whose primary context is retained, by bit */
	void *context[DEVICES_MAX]; /* in which each device's copies are made */
	bool invalid;      /* one of those has ended, and took streams and slots along */
};
extern struct stripes stripes;

/* layout.c: walks through the chunks of one stripe, beginning with a cursor whose `skip` is the stripe's number. */
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

/* contexts.c: held by a thread that makes or releases something in a context, and by one that ends a context. */
bool contexts_hold(int64_t until_ns); /* false: a thread that is parked ends one, or it takes too long */
void contexts_let_go(void);
void contexts_forget(void);

/* Tasks of workers. */
/* copy_resources.c */
int enter_devices(struct worker *worker); /* one worker's: finds contexts */
int prepare(struct worker *worker);   /* makes slots and streams; what is there already stays */
int map_stripe(struct worker *worker);   /* never fails */
int clean_up(struct worker *worker);
int leave_devices(struct worker *worker); /* one worker's */
int enter(struct worker *worker, int device); /* makes its context current */
void resources_forget(void);
/* rehearsal.c */
int rehearse(struct worker *worker); /* one worker's */
/* streaming_copy.c */
void streaming_copy(char *to, const char *from, uint64_t bytes);
/* copying.c */
int drop_freed(struct worker *worker); /* one worker's */
int copy_out(struct worker *worker);
int copy_in(struct worker *worker);
int detach_all(struct worker *worker); /* takes the physical memory away */
int attach_all(struct worker *worker); /* gives it back; when one worker fails, detach_all has to follow */

#endif
