/* Starts the threads that copy, gives them tasks and waits for them.
 *
 * They make all calls into CUDA and the control thread makes none, because such calls have no deadline: one that does not
 * return must not block the only thread that reads the mailbox. Invariant: a worker accesses only its own record, the table
 * and its slots.
 */
#define _GNU_SOURCE
#include "workers.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>

#include "core/shim.h"

#define STACK_BYTES (1024 * 1024)
#define GRACE_NS 1500000000 /* for a call in progress when the task has to stop */
#define LOOK_NS 20000000

struct worker workers[SNAPSHIM_STRIPES_MAX];

static unsigned int there; /* how many threads */
static int64_t deadline_ns;
static int failed; /* the first errno of a task */

int driver_status(int answer)
{
	return answer == CUDA_OUT_OF_MEMORY ? ENOMEM : EIO;
}

int worker_fails(struct worker *worker, int status, const char *call, long answer)
{
	worker->call = call;
	worker->answer = answer;
	return status;
}

int worker_should_stop(void)
{
	if (LOAD(&deadline_ns) == FOREVER)
		return 0;
	if (LOAD(&failed))
		return LOAD(&failed);
	if (LOAD(&snapshim_mailbox.device_cancel))
		return ECANCELED;
	return now_ns() >= LOAD(&deadline_ns) ? ETIMEDOUT : 0;
}

static void *work(void *given)
{
	struct worker *worker = given;
	uint32_t request = 0;

	prctl(PR_SET_NAME, "snapshim-memory");
	STORE(&worker->tid, self_tid());
	for (;;) {
		int none = 0;

		while (LOAD(&worker->asked) == request)
			wait_word(&worker->asked, request, FOREVER);
		request = LOAD(&worker->asked);
		worker->status = worker->task(worker);
		if (worker->status)
			(void)SWAP_IF(&failed, &none, worker->status);
		STORE(&worker->done, request);
		wake_word(&worker->done);
	}
	return NULL;
}

static void ask(struct worker *worker, int (*task)(struct worker *))
{
	worker->task = task;
	worker->status = 0;
	worker->call = NULL;
	STORE(&worker->asked, worker->asked + 1);
	wake_word(&worker->asked);
}

int workers_start(unsigned int count)
{
	pthread_attr_t attributes;
	int status = 0;

	pthread_attr_init(&attributes);
	while (there < count && !status) {
		struct worker *worker = &workers[there];
		pthread_t thread;

		worker->asked = worker->done = 0;
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		pthread_attr_setstacksize(&attributes, STACK_BYTES);
		status = create_exempt_thread(&thread, &attributes, work, worker);
		if (status == EINVAL) { /* programs with much thread-local data need larger stacks */
			pthread_attr_destroy(&attributes);
			pthread_attr_init(&attributes);
			pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
			status = create_exempt_thread(&thread, &attributes, work, worker);
		}
		if (!status)
			STORE(&there, there + 1);
	}
	pthread_attr_destroy(&attributes);
	return status;
}

bool memory_has_thread(int tid)
{
	for (unsigned int i = 0; i < LOAD(&there); i++)
		if (LOAD(&workers[i].tid) == tid)
			return true;
	return false;
}

static bool is_back(struct worker *worker)
{
	return LOAD(&worker->done) == worker->asked;
}

bool workers_are_back(void)
{
	for (unsigned int i = 0; i < there; i++)
		if (!is_back(&workers[i]))
			return false;
	return true;
}

bool workers_come_back(int64_t until_ns)
{
	for (unsigned int i = 0; i < there; i++)
		while (!is_back(&workers[i])) {
			if (now_ns() >= until_ns)
				return false;
			wait_word(&workers[i].done, workers[i].asked - 1, LOOK_NS);
		}
	return true;
}

/* The task may continue until `stop_ns`; workers that have not returned at `patience_ns` are not waited for. */
static int run(unsigned int count, int (*task)(struct worker *worker), int64_t stop_ns, int64_t patience_ns)
{
	STORE(&failed, 0);
	STORE(&deadline_ns, stop_ns);
	for (unsigned int i = 0; i < count; i++)
		ask(&workers[i], task);
	for (unsigned int i = 0; i < count; i++)
		while (!is_back(&workers[i])) {
			int stop = worker_should_stop(), none = 0;

			if (stop && patience_ns == FOREVER) {
				patience_ns = now_ns() + GRACE_NS;
				SWAP_IF(&failed, &none, stop); /* for a task that returns late */
			}
			if (now_ns() >= patience_ns)
				return EINPROGRESS;
			wait_word(&workers[i].done, workers[i].asked - 1, LOOK_NS);
		}
	return LOAD(&failed);
}

int workers_run(unsigned int count, int (*task)(struct worker *worker), int64_t until_ns)
{
	return run(count, task, until_ns, FOREVER);
}

int workers_finish(unsigned int count, int (*task)(struct worker *worker), int64_t until_ns)
{
	return run(count, task, FOREVER, until_ns);
}

/* In a forked child: they are its parent's. */
void workers_forget(void)
{
	there = 0;
	memset(workers, 0, sizeof(workers));
}
