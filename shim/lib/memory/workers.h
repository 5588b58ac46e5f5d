/* The shim's own threads that copy; they are never parked. They start with the first MEMORY_READY and sleep between
 * commands. They persist through a dump and a restore, so that none has to be created while the job is parked. */
#ifndef SNAPSHIM_MEMORY_WORKERS_H
#define SNAPSHIM_MEMORY_WORKERS_H

#include <pthread.h>

#include "abi.h"
#include "blocks.h"

#define SLOTS 2 /* of each worker: one on its way to or from the device, one to or from the file */

struct worker {
	unsigned int number; /* also of its stripe */
	int stripe;      /* the file */
	char *mapped;      /* its beginning, as far as its pages are populated */
	uint64_t mapped_bytes, reserved_bytes;
	char *slot[SLOTS];   /* pinned */
	void *stream[DEVICES_MAX][SLOTS];

	/* Why it failed: a text, and the number that follows it. */
	const char *call;
	long answer;

	int tid;
	int (*task)(struct worker *worker); /* 0 or an errno */
	int status;
	uint32_t asked, done;
};

extern struct worker workers[SNAPSHIM_STRIPES_MAX];

int workers_start(unsigned int count); /* those that are not there yet; 0 or an errno */
/* Gives the first `count` workers a task and waits. 0 or the first error; EINPROGRESS: one has not returned, long after it
 * should have stopped. */
int workers_run(unsigned int count, int (*task)(struct worker *worker), int64_t until_ns);
/* Runs a task that is never stopped early, but waits for it only until `until_ns`. */
int workers_finish(unsigned int count, int (*task)(struct worker *worker), int64_t until_ns);
bool workers_are_back(void);
bool workers_come_back(int64_t until_ns);
void workers_forget(void);

/* Records why a worker's task failed. */
int worker_fails(struct worker *worker, int status, const char *call, long answer);
int driver_status(int answer); /* the errno for it */
#define CUDA(worker, call, ...)                                                                              \
	({                                                                                                   \
		int answer_ = driver()->call(__VA_ARGS__);                                                   \
                                                                                                             \
		answer_ ? worker_fails(worker, driver_status(answer_), #call " answers", answer_) : 0;                  \
	})

/* Whether the deadline has passed, the daemon has cancelled, or another worker has failed. 0 or an errno. */
int worker_should_stop(void);

#endif
