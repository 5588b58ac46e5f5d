/* The preparation for copying device memory: what MEMORY_READY creates and MEMORY_DROP releases. */
#ifndef SNAPSHIM_MEMORY_READINESS_H
#define SNAPSHIM_MEMORY_READINESS_H

#include "memory.h"

#define CLEAN_UP_NS 30000000000 /* for the clean-up after a command, whatever its outcome */

/* The stripes that hold the content while memory is offloaded. */
extern struct offloaded_as {
	unsigned int count;
	size_t slot_bytes;
} offloaded_as;

/* Returns `status`. Keeps an earlier text, which is nearer to the cause. */
int refuse(int status, const char *reason);
/* Describes which call of which worker failed. */
int explain(int status);

/* MEMORY_OPEN, MEMORY_READY, MEMORY_DROP. `give_up` releases what can be released; only EBUSY is an error. */
int open_sockets(void);
int make_ready(int64_t until_ns);
int give_up(void);
/* The end of OFFLOAD and FILL, which also fail if something is left that a dump would contain. */
int settled(int status, int64_t by_ns);

bool is_ready(void);
bool is_ready_to_hold(void); /* for HAND_OVER and TAKE_BACK */
bool earlier_calls_are_back(void); /* waits a moment for calls of earlier commands */
int prepare_all(int64_t until_ns); /* creates what is missing since READY */
void let_contexts_go(int status);  /* `status`: the result of the tasks that used them */
uint64_t striped_bytes(void);
void readiness_forget(void);

#endif
