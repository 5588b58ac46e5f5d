/* The control thread's side of the NCCL commands. Each runs on a new thread that is never parked, because NCCL's calls
 * have no deadline. The control thread waits until the deadline, or until the daemon cancels the command, and then reports
 * what has not returned.
 *
 * A command that was given up continues until NCCL returns; until then no other command that calls NCCL is started. Commands
 * about the gate (close, targets, report, open) are always carried out. This file takes no lock and does not allocate.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "core/shim.h"
#include "command.h"

#define STACK_BYTES (1024 * 1024) /* NCCL's initialisation runs on it */
#define GRACE_NS 1000000000	  /* for what a cancelled attach still has to clean up */
#define LOOK_AGAIN_NS 10000000	  /* between reads of `cancel`: writing it wakes no thread */

static char *room; /* where the daemon writes requests */
static size_t room_bytes;
static uint64_t jobs; /* that were made */
static char *reply; /* what the last command answered; the daemon reads it */

static int start(void *(*routine)(void *), struct nccl_job *job)
{
	pthread_attr_t attributes;
	pthread_t thread;
	int status;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	atomic_fetch_add(&job->holders, 1);
	status = libc_create_thread()(&thread, &attributes, routine, job);
	pthread_attr_destroy(&attributes);
	if (status)
		job_let_go(job);
	return status;
}

static void wait_for(struct nccl_job *job, int64_t until_ns)
{
	while (!LOAD(&job->done) && now_ns() < until_ns)
		wait_word(&job->done, 0, until_ns - now_ns());
}

/* Compares numbers, so that a cancellation that is written late, for a request that was answered, cancels no other. */
static bool is_cancelled(void)
{
	return LOAD(&snapshim_mailbox.cancel) == LOAD(&snapshim_mailbox.request);
}

static void wait_unless_cancelled(struct nccl_job *job, int64_t until_ns)
{
	while (!LOAD(&job->done) && now_ns() < until_ns && !is_cancelled()) {
		int64_t look_ns = now_ns() + LOOK_AGAIN_NS;

		wait_for(job, look_ns < until_ns ? look_ns : until_ns);
	}
}

static struct nccl_job *make(uint32_t command, size_t bytes, int64_t timeout_ns)
{
	size_t whole = sizeof(struct nccl_job) + bytes + 1;
	struct nccl_job *job = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (job == MAP_FAILED)
		return NULL;
	job->command = command;
	job->number = ++jobs;
	job->until_ns = now_ns() + timeout_ns;
	job->request = (char *)(job + 1);
	if (bytes)
		memcpy(job->request, room, bytes);
	job->bytes = whole;
	atomic_store(&job->holders, 1);
	return job;
}

static int make_room(uint64_t bytes)
{
	if (bytes > room_bytes) {
		if (room)
			munmap(room, room_bytes);
		room_bytes = 0;
		room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (room == MAP_FAILED) {
			room = NULL;
			return ENOMEM;
		}
		room_bytes = bytes;
	}
	snapshim_mailbox.result[0] = (uintptr_t)room;
	return 0;
}

int nccl_dispatch(uint32_t command, int64_t timeout_ns)
{
	uint64_t bytes = snapshim_mailbox.argument[1];
	bool exclusive = command >= SNAPSHIM_NCCL_DETACH, cancelled = false;
	struct nccl_job *job;
	int status;

	if (command == SNAPSHIM_NCCL_ROOM)
		return make_room(bytes);
	if (bytes > room_bytes)
		return EINVAL;
	job = make(command, bytes, timeout_ns);
	if (!job)
		return ENOMEM;
	if (exclusive && !job_claim(job)) {
		add_text("an earlier command still waits for a call into NCCL to return");
		job_let_go(job);
		return EBUSY;
	}
	job->stale = reply;
	reply = NULL;
	status = start(job_run, job);
	if (status && exclusive)
		job_over(job);
	if (!status) {
		if (exclusive)
			wait_unless_cancelled(job, job->until_ns);
		else
			wait_for(job, job->until_ns);
		if (!LOAD(&job->done) && exclusive) {
			cancelled = is_cancelled();
			atomic_store(&job->given_up, true);
			if (command == SNAPSHIM_NCCL_ATTACH)
				start(job_cancel, job);
			wait_for(job, now_ns() + GRACE_NS);
		}
		status = LOAD(&job->done) ? job->status : ETIMEDOUT;
		if (LOAD(&job->done)) {
			if (cancelled && status == ETIMEDOUT) {
				status = ECANCELED;
				add_text("cancelled by the daemon");
			} else {
				add_text(job->message);
			}
			reply = job->reply;
			job->reply = NULL;
			snapshim_mailbox.result[0] = (uintptr_t)reply;
			snapshim_mailbox.result[1] = job->reply_bytes;
		} else {
			add_text("a call into NCCL did not return in time");
		}
	}
	job_let_go(job);
	return status;
}

/* In a forked child: it has none of our threads. */
void nccl_forget(void)
{
	jobs_forget();
	rdma_forget();
}
