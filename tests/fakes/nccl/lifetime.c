/* The end of a communicator: finalise, destroy, abort.
 *
 * Invariant: after ncclCommDestroy or ncclCommAbort nothing of the communicator is left in the process: no thread, no
 * descriptor, no memory. Ranks of one communicator in one process end together: the first calls return at once and the
 * last one waits for all, because a single thread may make these calls one after the other.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "communicator.h"
#include "faults.h"
#include "rendezvous.h"

/* With the lock. */
static void give_goodbye(struct ncclComm *comm, bool same_host)
{
	struct batch *batch = calloc(1, sizeof(*batch));

	if (!batch)
		abort();
	batch->finalize = true;
	batch->same_host = same_host;
	worker_give(comm, batch);
}

/* With the lock: whether destroy (or finalise) is still to be called for another rank of the communicator in this process. */
static bool others_go_on(const struct ncclComm *comm, bool finalizing)
{
	const struct ncclComm *other;

	for (other = comm_first(); other; other = other->next)
		if (other != comm && other->id == comm->id && !other->destroy_called &&
		    !(finalizing && other->finalize_called))
			return true;
	return false;
}

/* With the lock: waits until the workers of all ranks in this process are done, one failed, or `comm` was aborted. */
static ncclResult_t await_workers(struct ncclComm *comm)
{
	for (;;) {
		const struct ncclComm *other;
		bool busy = false;

		if (comm->aborted)
			return failed(ncclInternalError, "aborted while it was being ended");
		for (other = comm_first(); other; other = other->next) {
			if (other->id != comm->id || other->worker_done)
				continue;
			if (other->async_result != ncclSuccess)
				return failed(other->async_result, "%s", other->reason);
			busy = true;
		}
		if (!busy)
			return ncclSuccess;
		pthread_cond_wait(&library_changed, &library_lock);
	}
}

ncclResult_t ncclCommFinalize(ncclComm_t handle)
{
	ncclResult_t result;
	struct ncclComm *comm = comm_enter_ready(handle, &result);
	bool waits = false, join = false;

	if (!comm)
		return result;
	pthread_mutex_lock(&library_lock);
	if (comm->finalize_called || comm->revoked) {
		result = failed(ncclInvalidArgument, "finalised or revoked already");
	} else {
		comm->finalize_called = true;
		give_goodbye(comm, false);
		waits = comm->blocking && !others_go_on(comm, true);
	}
	if (waits)
		result = await_workers(comm);
	else if (result == ncclSuccess && !comm->blocking)
		result = ncclInProgress;
	if (waits && result == ncclSuccess) {
		join = comm->worker_started;
		comm->worker_started = false;
	}
	pthread_mutex_unlock(&library_lock);
	if (join)
		pthread_join(comm->worker, NULL);
	comm_leave(comm);
	return result;
}

/* With the lock, which it releases temporarily: frees all ranks of this process. `comm` is entered once, by the caller. */
static void free_together(struct ncclComm *comm)
{
	struct ncclComm *freed = NULL, *one, *next;
	uint64_t id = comm->id;

	comm->users--;
	for (one = comm_first(); one; one = next) {
		next = one->next;
		if (one->id != id)
			continue;
		comm_unlist(one);
		one->next = freed;
		freed = one;
	}
	for (one = freed; one; one = one->next)
		while (one->users)
			pthread_cond_wait(&library_changed, &library_lock);
	pthread_mutex_unlock(&library_lock);
	for (one = freed; one; one = next) {
		next = one->next;
		comm_free(one);
	}
	pthread_mutex_lock(&library_lock);
}

ncclResult_t ncclCommDestroy(ncclComm_t handle)
{
	ncclResult_t result = ncclSuccess;
	struct ncclComm *comm;
	bool last = false;

	if (!handle)
		return ncclSuccess;
	if (!(comm = comm_enter_ready(handle, &result)))
		return result;
	if ((result = fault_at("destroy", comm->rank, comm)) != ncclSuccess) {
		comm_leave(comm);
		return result;
	}
	pthread_mutex_lock(&library_lock);
	if (comm->aborted) {
		result = failed(ncclInternalError, "aborted while it was being destroyed");
	} else {
		comm->destroy_called = true;
		if (!comm->finalize_called && !comm->revoked)
			give_goodbye(comm, true);
		last = !others_go_on(comm, false);
		if (last && (result = await_workers(comm)) != ncclSuccess)
			comm->destroy_called = false; /* it can still be aborted */
	}
	if (last && result == ncclSuccess) {
		free_together(comm);
	} else {
		comm->users--;
		pthread_cond_broadcast(&library_changed);
	}
	pthread_mutex_unlock(&library_lock);
	rendezvous_settle(0, false);
	return result;
}

/* With the lock, which it releases temporarily: ends one communicator without waiting for any other rank. */
static void abort_one(struct ncclComm *comm)
{
	comm->aborted = true;
	comm_unlist(comm);
	pthread_mutex_unlock(&library_lock);
	comm_stop(comm, true);
	pthread_mutex_lock(&library_lock);
	while (comm->users) /* calls inside it: they see that it was stopped */
		pthread_cond_wait(&library_changed, &library_lock);
	pthread_mutex_unlock(&library_lock);
	comm_free(comm);
	pthread_mutex_lock(&library_lock);
}

/* With the lock: a rank of this process whose destroy returned early to wait for another rank's, if none is left to come. */
static struct ncclComm *left_behind(uint64_t id)
{
	struct ncclComm *other, *found = NULL;

	for (other = comm_first(); other; other = other->next) {
		if (other->id != id)
			continue;
		if (!other->destroy_called || other->users)
			return NULL; /* its own destroy or abort will end it and the others */
		found = other;
	}
	return found;
}

void comm_abort(struct ncclComm *comm)
{
	uint64_t id = comm->id;
	struct ncclComm *other;

	pthread_mutex_lock(&library_lock);
	if (comm->building) { /* NCCL does not wait for that call: it uses freed memory */
		fprintf(stderr, "libnccl stand-in: ncclCommAbort frees a communicator that a blocking call is creating\n");
		abort();
	}
	abort_one(comm);
	while ((other = left_behind(id)))
		abort_one(other);
	pthread_mutex_unlock(&library_lock);
	rendezvous_settle(0, false);
}

ncclResult_t ncclCommAbort(ncclComm_t handle)
{
	ncclResult_t result = ncclSuccess;
	struct ncclComm *comm;
	int rank = -1;

	if (!handle)
		return ncclSuccess;
	pthread_mutex_lock(&library_lock);
	if ((comm = comm_listed(handle)))
		rank = comm->rank;
	pthread_mutex_unlock(&library_lock);
	if ((result = fault_at("abort", rank, NULL)) != ncclSuccess)
		return result;
	pthread_mutex_lock(&library_lock);
	if (!(comm = comm_listed(handle))) {
		pthread_mutex_unlock(&library_lock);
		return failed(ncclInvalidArgument, "%p is no communicator of this library", (void *)handle);
	}
	comm->aborted = true;
	pthread_mutex_unlock(&library_lock);
	comm_stop(comm, true);
	if (!group_add_abort(comm))
		comm_abort(comm);
	return ncclSuccess;
}
