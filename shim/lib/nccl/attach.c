/* Rebuilds the real communicators of virtual ones from new unique ids, and tests each before it is used.
 *
 * Every one becomes a root communicator, also one that was split or shrunk before: size, rank and config suffice. All are
 * initialised at once, in groups of NCCL, so no member waits for one communicator before it takes part in the next. They are
 * tested in the order of the request, which is the same for all members, so they cannot deadlock. Invariant: all or nothing.
 * On failure all that this attempt created is aborted, and all communicators are DETACHED as before.
 *
 * Each is created with the job's own config, also if that says blocking. NCCL cannot change `blocking` afterwards, and a
 * non-blocking communicator would start a thread for each of the job's launches and answer ncclInProgress. So a thread of
 * ours can be inside a blocking call that never returns, and ncclCommAbort would free the communicator under it. Therefore
 * it is aborted inside a group of the thread that cancels: NCCL (2.22 and later) raises the abort flag at once, which ends
 * the call, and frees the communicator at ncclGroupEnd, which comes only after the call has returned.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attempt.h"
#include "command.h"
#include "device.h"
#include "gate.h"
#include "ids.h"
#include "redops.h"
#include "registrations.h"

#define LOOK_AGAIN_US 500

typedef ncclResult_t (*on_comm)(ncclComm_t);
typedef ncclResult_t (*ask_state)(ncclComm_t, ncclResult_t *);

static struct attempt *under_way; /* for attach_cancel; under the lock */

static void wait_a_little(void)
{
	nanosleep(&(struct timespec){0, LOOK_AGAIN_US * 1000}, NULL);
}

static int wait_ready(struct nccl_job *job, struct member *member, struct nccl_instance *instance, const char *what)
{
	ncclResult_t state = ncclInProgress, result = ncclSuccess;

	while (result == ncclSuccess && state == ncclInProgress) {
		result = REAL(instance, ncclCommGetAsyncError, ask_state)(atomic_load(&member->fresh), &state);
		if (result != ncclSuccess || state != ncclInProgress)
			break;
		if (!job_in_time(job))
			return job_fails(job, ETIMEDOUT, "communicator %016lx: %s is not done in time",
					 (unsigned long)member->comm->id, what);
		wait_a_little();
	}
	if (result == ncclSuccess && state == ncclSuccess)
		return 0;
	return job_fails(job, EIO, "communicator %016lx: %s failed with NCCL error %d", (unsigned long)member->comm->id, what,
			 result ? (int)result : (int)state);
}

/* Before a call that may never return: from here on it can be cancelled. False: the command was given up already. */
static bool enter_call(const struct nccl_job *job, struct member *member)
{
	atomic_store(&member->holder, INSIDE_A_CALL);
	return job_in_time(job); /* read after the store: a thread that cancels later sees that this one is inside */
}

/* After that call. False: it was cancelled. The thread that cancels frees the new communicator, from now on. */
static bool leave_call(struct member *member)
{
	int inside = INSIDE_A_CALL;

	if (atomic_compare_exchange_strong(&member->holder, &inside, WORKER))
		return true;
	atomic_store(&member->holder, LEFT);
	return false;
}

static int fail_cancelled(struct nccl_job *job, const struct member *member, const char *what)
{
	return job_fails(job, ETIMEDOUT, "communicator %016lx: %s did not end in time and was aborted",
			 (unsigned long)member->comm->id, what);
}

static ncclResult_t init_member(struct member *member, struct nccl_instance *instance, const ncclUniqueId *id)
{
	struct nccl_comm *comm = member->comm;
	int nranks = atomic_load(&comm->nranks), rank = atomic_load(&comm->rank);
	ncclResult_t result;

	member->entered = device_enter(atomic_load(&comm->device));
	if (comm->config)
		result = REAL(instance, ncclCommInitRankConfig,
			      ncclResult_t (*)(ncclComm_t *, int, ncclUniqueId, int, void *))(&member->made, nranks, *id,
											      rank, comm->config);
	else
		result = REAL(instance, ncclCommInitRank,
			      ncclResult_t (*)(ncclComm_t *, int, ncclUniqueId, int))(&member->made, nranks, *id, rank);
	atomic_store(&member->fresh, member->made);
	return result;
}

/* Starts the blocking ones or the others. They must not be in one group. */
static ncclResult_t init_group(struct attempt *attempt, bool blocking, struct nccl_instance *instance)
{
	ncclResult_t result = ncclSuccess, ended;
	bool any = false;

	for (size_t i = 0; i < attempt->count; i++)
		any = any || comm_blocks(attempt->members[i].comm) == blocking;
	if (!any)
		return ncclSuccess;
	REAL(instance, ncclGroupStart, ncclResult_t (*)(void))();
	for (size_t i = 0; i < attempt->count && (result == ncclSuccess || result == ncclInProgress); i++)
		if (comm_blocks(attempt->members[i].comm) == blocking)
			result = init_member(&attempt->members[i], instance, &attempt->members[i].id);
	ended = REAL(instance, ncclGroupEnd, ncclResult_t (*)(void))();
	return ended != ncclSuccess && ended != ncclInProgress ? ended : result;
}

/* All communicators of the request. The non-blocking ones first: their group returns at once, so that a member that waits
 * in its blocking group finds them. */
static int init_all(struct nccl_job *job, struct attempt *attempt, struct nccl_instance *instance)
{
	ncclResult_t result = ncclSuccess;
	bool in_time = true, cancelled = false;

	for (size_t i = 0; i < attempt->count; i++)
		in_time = enter_call(job, &attempt->members[i]) && in_time;
	if (in_time)
		result = init_group(attempt, false, instance);
	if (in_time && (result == ncclSuccess || result == ncclInProgress))
		result = init_group(attempt, true, instance);
	for (size_t i = 0; i < attempt->count; i++) {
		if (attempt->members[i].entered)
			device_leave(atomic_load(&attempt->members[i].comm->device));
		if (leave_call(&attempt->members[i]))
			atomic_store(&attempt->members[i].fresh, attempt->members[i].made); /* NULL, if NCCL has freed it */
		else
			cancelled = true;
	}
	if (!in_time)
		return job_fails(job, ETIMEDOUT, "no time left for %zu communicators", attempt->count);
	if (cancelled)
		return job_fails(job, ETIMEDOUT,
				 "the initialisation of %zu communicators did not end in time and was aborted",
				 attempt->count);
	if (result != ncclSuccess && result != ncclInProgress)
		return job_fails(job, job_in_time(job) ? EIO : ETIMEDOUT,
				 "ncclCommInitRank of %zu communicators failed with NCCL error %d%s", attempt->count,
				 (int)result, job_in_time(job) ? "" : " after the time was up");
	for (size_t i = 0; i < attempt->count; i++) {
		if (wait_ready(job, &attempt->members[i], instance, "initialisation"))
			return job->status;
		id_used(&attempt->members[i].id, 1); /* not before: its thread waits until all members have come */
	}
	return 0;
}

/* One tiny all-reduce: the sum of 1 … n. */
static int try_member(struct nccl_job *job, struct member *member, struct nccl_instance *instance)
{
	typedef ncclResult_t (*all_reduce)(uint64_t, uint64_t, size_t, int, int, ncclComm_t, void *);
	int device = atomic_load(&member->comm->device), nranks = atomic_load(&member->comm->nranks), look = 0;
	/* The sum wraps in communicators of more than 65,535 ranks, here as on the devices. */
	int32_t expected = (int32_t)(uint32_t)((uint64_t)nranks * ((uint64_t)nranks + 1) / 2);
	bool entered = device_enter(device);
	struct device_pair pair;
	int32_t value = 0;
	ncclResult_t result = ncclSuccess;
	bool in_time;

	if (device_pair_make(&pair, entered, atomic_load(&member->comm->rank) + 1, member->comm->trial) != 0) {
		device_pair_free(&pair); /* what there is of it */
		if (entered)
			device_leave(device);
		return job_fails(job, ENOMEM, "no device memory to try communicator %016lx with",
				 (unsigned long)member->comm->id);
	}
	in_time = enter_call(job, member);
	if (in_time)
		result = REAL(instance, ncclAllReduce, all_reduce)(pair.memory, pair.memory + 4, 1, ncclInt32, ncclSum,
								   atomic_load(&member->fresh), pair.stream);
	if (!leave_call(member) || !in_time)
		fail_cancelled(job, member, "trying it");
	else if (result != ncclSuccess && result != ncclInProgress)
		job_fails(job, EIO, "communicator %016lx: its test failed: ncclAllReduce returned NCCL error %d",
			  (unsigned long)member->comm->id, (int)result);
	else if (wait_ready(job, member, instance, "trying it") == 0)
		while ((look = device_pair_look(&pair, expected, &value)) == 0) {
			ncclResult_t state = ncclSuccess;

			REAL(instance, ncclCommGetAsyncError, ask_state)(atomic_load(&member->fresh), &state);
			if (!job_in_time(job) || (state != ncclSuccess && state != ncclInProgress)) {
				job_fails(job, state ? EIO : ETIMEDOUT,
					  "communicator %016lx was built, but its first all-reduce %s",
					  (unsigned long)member->comm->id,
					  state ? "failed" : "did not end in time, or is wrong");
				break;
			}
			wait_a_little();
		}
	if (look < 0 || (look > 0 && value != expected))
		job_fails(job, EIO, "communicator %016lx was built, but its first all-reduce gave %d instead of %d",
			  (unsigned long)member->comm->id, value, expected);
	if (look > 0) /* otherwise NCCL may still write to it */
		device_pair_free(&pair);
	if (entered)
		device_leave(device);
	return job->status;
}

static int build(struct nccl_job *job, struct attempt *attempt, struct nccl_instance *instance)
{
	if (!attempt->count)
		return 0;
	if (init_all(job, attempt, instance))
		return job->status;
	for (size_t i = 0; i < attempt->count; i++) {
		struct member *member = &attempt->members[i];
		ncclResult_t result;
		uint64_t before;

		nccl_lock(&before);
		result = registrations_attach(member->comm, atomic_load(&member->fresh), instance);
		nccl_unlock(&before);
		if (result != ncclSuccess)
			return job_fails(job, EIO, "communicator %016lx: a buffer cannot be registered again, NCCL error %d",
					 (unsigned long)member->comm->id, (int)result);
	}
	for (size_t i = 0; i < attempt->count; i++)
		/* Several members of one process are not tried, because that would have to be done concurrently. */
		if (attempt->members[i].to_be_tried && try_member(job, &attempt->members[i], instance))
			return job->status;
	/* A command that was given up has already reported failure. */
	return job_in_time(job) ? 0 : job_fails(job, ETIMEDOUT, "they were built after the time was up");
}

static void publish(struct attempt *attempt, struct nccl_instance *instance)
{
	for (size_t i = 0; i < attempt->count; i++) {
		struct nccl_comm *comm = attempt->members[i].comm;
		ncclComm_t real = atomic_load(&attempt->members[i].fresh);
		uint64_t before;
		int doomed;

		if (atomic_load(&comm->finalized))
			REAL(instance, ncclCommFinalize, on_comm)(real);
		nccl_lock(&before);
		doomed = atomic_load(&comm->doomed);
		if (!doomed) {
			/* Buffers that were registered since. A failure is ignored: buffers work without registration. */
			registrations_attach(comm, real, instance);
			atomic_store(&comm->real, real);
			atomic_store(&comm->state, LIVE);
			held_look_again();
		}
		nccl_unlock(&before);
		if (doomed) {
			REAL(instance, ncclCommAbort, on_comm)(real);
			redops_forget(comm);
			comm_end(comm, doomed == 2);
		}
	}
}

static void undo(struct attempt *attempt, struct nccl_instance *instance)
{
	for (size_t i = 0; i < attempt->count; i++) {
		struct member *member = &attempt->members[i];
		ncclComm_t real = atomic_exchange(&member->fresh, NULL);
		struct nccl_registration *registration;
		uint64_t before;
		int doomed;

		if (real && atomic_load(&member->holder) == WORKER)
			REAL(instance, ncclCommAbort, on_comm)(real);
		nccl_lock(&before);
		for (registration = member->comm->registrations; registration; registration = registration->next)
			registration->real = NULL; /* gone with it */
		atomic_store(&member->comm->state, DETACHED);
		held_look_again();
		doomed = atomic_load(&member->comm->doomed);
		nccl_unlock(&before);
		if (doomed) {
			redops_forget(member->comm);
			comm_end(member->comm, doomed == 2);
		}
	}
}

static void show(struct attempt *attempt)
{
	uint64_t before;

	nccl_lock(&before);
	under_way = attempt;
	nccl_unlock(&before);
}

/* Raises the abort flag of each new communicator whose call the worker is inside, until the worker is inside none. Outside
 * such a call the worker itself notices the cancellation, and aborts what it has created. */
static void abort_calls(struct attempt *attempt, struct nccl_instance *instance)
{
	bool inside = true;

	while (inside) {
		inside = false;
		for (size_t i = 0; i < attempt->count; i++) {
			struct member *member = &attempt->members[i];
			ncclComm_t real = atomic_load(&member->fresh);
			int holder = INSIDE_A_CALL;

			if (real && atomic_compare_exchange_strong(&member->holder, &holder, CANCELLED)) {
				REAL(instance, ncclCommAbort, on_comm)(real);
				holder = CANCELLED;
			} else {
				holder = atomic_load(&member->holder);
			}
			inside = inside || holder == INSIDE_A_CALL || holder == CANCELLED;
		}
		if (inside)
			wait_a_little();
	}
}

void attach_cancel(const struct nccl_job *job)
{
	struct nccl_instance *instance = real_instance();
	struct attempt *attempt;
	uint64_t before;

	nccl_lock(&before);
	attempt = under_way && under_way->job == job->number ? under_way : NULL;
	if (attempt)
		atomic_fetch_add(&attempt->holders, 1);
	nccl_unlock(&before);
	if (!attempt)
		return;
	REAL(instance, ncclGroupStart, ncclResult_t (*)(void))();
	abort_calls(attempt, instance);
	REAL(instance, ncclGroupEnd, ncclResult_t (*)(void))(); /* frees them */
	attempt_let_go(attempt);
}

int attach(struct nccl_job *job)
{
	struct nccl_instance *instance = real_instance();
	struct attempt *attempt;
	int failed;

	if (!instance)
		return job_fails(job, ENOENT, "the process has loaded no NCCL");
	attempt = attempt_begin(job);
	if (!attempt)
		return job->status;
	show(attempt);
	failed = build(job, attempt, instance);
	show(NULL);
	if (failed)
		undo(attempt, instance);
	else
		publish(attempt, instance);
	attempt_let_go(attempt);
	return failed;
}
