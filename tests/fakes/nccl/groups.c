/* Groups: the calls of a thread between ncclGroupStart and ncclGroupEnd start together at the outermost end.
 *
 * Invariant: operations outside a group are groups of one, so there is one way to launch. A launch is atomic: no other
 * thread's operation comes between those of a group, on a stream or on a communicator. A call that fails inside a group
 * fails the whole group, and nothing of it is launched.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "communicator.h"

enum blocking { UNKNOWN, BLOCKING, NONBLOCKING };

struct group {
	int depth;
	ncclResult_t result;
	enum blocking blocking;
	struct operation *operations;
	struct job *jobs;
	struct ending *endings;
};

/* A communicator that was aborted inside the group: it is freed at its end, as with NCCL 2.22 and later. */
struct ending {
	struct ending *next;
	struct ncclComm *comm;
};

static __thread struct group current;

void group_start(void)
{
	current.depth++;
}

ncclResult_t group_note(ncclResult_t result)
{
	if (current.depth && current.result == ncclSuccess && result != ncclSuccess && result != ncclInProgress)
		current.result = result;
	return result;
}

static ncclResult_t admit(const struct ncclComm *comm)
{
	enum blocking blocking = comm->blocking ? BLOCKING : NONBLOCKING;

	if (current.blocking != UNKNOWN && current.blocking != blocking)
		return group_note(
			failed(ncclInvalidArgument, "blocking and non-blocking communicators cannot be used in one group"));
	current.blocking = blocking;
	return ncclSuccess;
}

ncclResult_t group_add_operation(const struct operation *operation)
{
	struct operation *copy, **end;
	ncclResult_t result, ended;

	group_start();
	result = admit(operation->comm);
	if (result == ncclSuccess && !(copy = malloc(sizeof(*copy))))
		result = group_note(failed(ncclSystemError, "out of memory"));
	if (result == ncclSuccess) {
		*copy = *operation;
		for (end = &current.operations; *end; end = &(*end)->next)
			;
		*end = copy;
	} else {
		comm_leave(operation->comm);
	}
	ended = group_end();
	return result == ncclSuccess ? ended : result;
}

ncclResult_t group_add_job(struct job *job)
{
	struct job **end;
	ncclResult_t result, ended;

	group_start();
	result = admit(job->parent ? job->parent : job->comm);
	if (result == ncclSuccess) {
		for (end = &current.jobs; *end; end = &(*end)->next)
			;
		*end = job;
	} else {
		jobs_drop(job);
	}
	ended = group_end();
	return result == ncclSuccess ? ended : result;
}

bool group_add_abort(struct ncclComm *comm)
{
	struct ending *ending;

	if (!current.depth)
		return false;
	if (!(ending = malloc(sizeof(*ending))))
		abort();
	*ending = (struct ending){current.endings, comm};
	current.endings = ending;
	return true;
}

static void end_aborted(struct ending *endings)
{
	struct ending *next;

	for (; endings; endings = next) {
		next = endings->next;
		comm_abort(endings->comm);
		free(endings);
	}
}

static void drop_operations(struct operation *operations)
{
	struct operation *next;

	for (; operations; operations = next) {
		next = operations->next;
		comm_leave(operations->comm);
		free(operations);
	}
}

/* A rank that sends to itself must receive from itself in the same group: no other rank can do it. */
static ncclResult_t check_self(const struct operation *operations)
{
	const struct operation *one, *other;

	for (one = operations; one; one = one->next) {
		long balance = 0;

		for (other = operations; other; other = other->next)
			if (other->comm == one->comm && other->root == one->comm->rank)
				balance += (other->opcode == OP_SEND) - (other->opcode == OP_RECV);
		if (balance && (one->opcode == OP_SEND || one->opcode == OP_RECV))
			return failed(ncclInvalidUsage,
				      "rank %d sends to itself: the matching receive must be in the same group",
				      one->comm->rank);
	}
	return ncclSuccess;
}

/* Passes each communicator its operations of the group as one batch, in the order in which communicators were first used. */
static void launch(struct operation *operations)
{
	struct operation *operation, *next, **end;
	struct batch *batch;

	pthread_mutex_lock(&library_lock);
	while ((operation = operations)) {
		struct ncclComm *comm = operation->comm;
		struct operation **place = &operations;

		if (!(batch = calloc(1, sizeof(*batch))))
			abort(); /* part of the group may already run: no error would be correct */
		end = &batch->operations;
		while (*place) {
			next = *place;
			if (next->comm != comm) {
				place = &next->next;
				continue;
			}
			*place = next->next;
			next->next = NULL;
			comm->users--;
			if (comm->worker_done) { /* aborted since the call */
				free(next);
				continue;
			}
			if (!(next->ticket = fakeNcclTicketTake(comm->device, next->stream, batch)))
				abort();
			*end = next;
			end = &next->next;
		}
		comm->launch_unseen = !comm->blocking;
		if (batch->operations)
			worker_give(comm, batch);
		else
			free(batch);
	}
	pthread_cond_broadcast(&library_changed);
	pthread_mutex_unlock(&library_lock);
}

ncclResult_t group_end(void)
{
	struct group group = current;
	ncclResult_t result = group.result;

	if (--current.depth)
		return ncclSuccess;
	current = (struct group){.depth = 0}; /* first: jobs and operations may call back into the library */
	end_aborted(group.endings);
	if (result == ncclSuccess)
		result = check_self(group.operations);
	if (result != ncclSuccess) {
		jobs_drop(group.jobs);
		drop_operations(group.operations);
		return result;
	}
	result = jobs_run(group.jobs, group.blocking != NONBLOCKING);
	if (result != ncclSuccess && result != ncclInProgress) {
		drop_operations(group.operations);
		return result;
	}
	if (group.operations) {
		launch(group.operations);
		if (group.blocking == NONBLOCKING)
			result = ncclInProgress;
	}
	return result;
}

ncclResult_t ncclGroupStart(void)
{
	group_start();
	return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
	if (!current.depth)
		return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
	return group_end();
}

#if FAKE_NCCL_VERSION >= 22200
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info)
{
	struct group group = current;

	if (!group.depth)
		return failed(ncclInvalidUsage, "ncclGroupSimulateEnd without ncclGroupStart");
	if (!info || info->magic != NCCL_SIM_INFO_MAGIC || info->size < sizeof(*info))
		group.result = group_note(
			failed(ncclInvalidArgument, "the info was not initialised with NCCL_SIM_INFO_INITIALIZER"));
	if (--current.depth)
		return group.result;
	current = (struct group){.depth = 0};
	end_aborted(group.endings);
	jobs_drop(group.jobs);
	drop_operations(group.operations);
	if (group.result == ncclSuccess)
		info->estimatedTime = 0.0f;
	return group.result;
}
#endif
