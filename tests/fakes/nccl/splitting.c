/* Communicators created from others: split and shrink.
 *
 * Members communicate over the parent's control links, not in the queue of its operations: a split continues while an
 * operation of the parent waits for a peer, as with NCCL. Invariant: children of one split, and of two splits, have
 * different ids.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "communicator.h"
#include "faults.h"

struct candidate {
	int32_t color, key;
	struct member self;
};

static ncclResult_t gather_candidates(struct job *job, enum opcode opcode, struct candidate *candidates,
				      const struct cancel *cancel)
{
	struct ncclComm *parent = job->parent;
	struct transfer *transfers = calloc(2 * (size_t)parent->nranks, sizeof(*transfers));
	struct signature signature = {.opcode = opcode, .count = (uint64_t)job->nexcluded};
	ncclResult_t result;
	size_t count = 0;
	int peer;

	if (!transfers)
		return failed(ncclSystemError, "out of memory");
	for (peer = 0; peer < parent->nranks; peer++) {
		if (peer == parent->rank || (job->excluded && job->excluded[peer]))
			continue;
		transfers[count++] = (struct transfer){.peer = peer,
						       .sending = true,
						       .signature = signature,
						       .data = &candidates[parent->rank],
						       .bytes = sizeof(*candidates)};
		transfers[count++] = (struct transfer){
			.peer = peer, .signature = signature, .data = &candidates[peer], .bytes = sizeof(*candidates)};
	}
	result = links_run(parent->control, parent->nranks, transfers, count, false, cancel);
	free(transfers);
	return result;
}

static uint64_t child_id(const struct ncclComm *parent, uint64_t split, int color)
{
	uint64_t id = parent->id;

	id = (id ^ split) * 0x9e3779b97f4a7c15u;
	id = ((id ^ id >> 29) ^ (uint64_t)(uint32_t)color) * 0xbf58476d1ce4e5b9u;
	return id ^ id >> 32;
}

/* The members of this rank's color by key, equal keys by their rank in the parent. */
static ncclResult_t assign(struct ncclComm *comm, struct ncclComm *parent, const struct candidate *candidates)
{
	const struct candidate *self = &candidates[parent->rank];
	int rank, other, nranks = 0, mine = 0;

	comm->members = calloc((size_t)parent->nranks, sizeof(*comm->members));
	if (!comm->members)
		return failed(ncclSystemError, "out of memory");
	for (rank = 0; rank < parent->nranks; rank++) {
		int place = 0;

		if (candidates[rank].color != self->color)
			continue;
		for (other = 0; other < parent->nranks; other++)
			if (candidates[other].color == self->color &&
			    (candidates[other].key < candidates[rank].key ||
			     (candidates[other].key == candidates[rank].key && other < rank)))
				place++;
		comm->members[place] = candidates[rank].self;
		nranks++;
		if (rank == parent->rank)
			mine = place;
	}
	pthread_mutex_lock(&library_lock); /* it is already listed, and other threads read the list */
	comm->id = child_id(parent, parent->splits, self->color);
	comm->nranks = nranks;
	comm->rank = mine;
	pthread_mutex_unlock(&library_lock);
	return ncclSuccess;
}

static ncclResult_t derive(struct job *job, enum opcode opcode)
{
	struct ncclComm *parent = job->parent, *comm = job->comm;
	const struct cancel cancel = job_cancel(job);
	struct candidate *candidates = calloc((size_t)parent->nranks, sizeof(*candidates));
	ncclResult_t result = fault_at(opcode_name(opcode), parent->rank, comm ? comm : parent);
	int listener = -1, rank;

	if (result == ncclSuccess && !candidates)
		result = failed(ncclSystemError, "out of memory");
	if (result == ncclSuccess) {
		for (rank = 0; rank < parent->nranks; rank++)
			candidates[rank].color = NCCL_SPLIT_NOCOLOR; /* the excluded ones never answer */
		candidates[parent->rank] = (struct candidate){.color = job->color, .key = job->key};
		if (comm)
			result = member_self(&candidates[parent->rank].self, &listener);
	}
	if (result == ncclSuccess)
		result = gather_candidates(job, opcode, candidates, &cancel);
	if (result == ncclSuccess) {
		pthread_mutex_lock(&library_lock);
		parent->splits++; /* without a color too: the others count it */
		pthread_mutex_unlock(&library_lock);
	}
	if (result == ncclSuccess && comm)
		result = assign(comm, parent, candidates);
	if (result == ncclSuccess && comm)
		result = bootstrap_mesh(comm, listener, &cancel);
	if (listener >= 0)
		close(listener);
	free(candidates);
	return result;
}

static ncclResult_t run_split(struct job *job)
{
	return derive(job, OP_SPLIT);
}

/* Creates the child (none without a color) and the job, which takes over the caller's use count of the parent. */
static ncclResult_t prepare(struct job **job, ncclResult_t (*run)(struct job *), struct ncclComm *parent, int color, int key,
			    ncclComm_t *child, const ncclConfig_t *config)
{
	struct ncclComm *comm = NULL;
	ncclResult_t result = ncclSuccess;

	if (!child)
		result = failed(ncclInvalidArgument, "nowhere to put the new communicator");
	else if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
		result = failed(ncclInvalidArgument, "a color is at least 0, or NCCL_SPLIT_NOCOLOR");
	pthread_mutex_lock(&library_lock);
	if (result == ncclSuccess && (!parent->ready || parent->finalize_called))
		result = failed(ncclInvalidUsage, "the communicator was finalised, or is not there yet");
	pthread_mutex_unlock(&library_lock);
	if (result == ncclSuccess && color != NCCL_SPLIT_NOCOLOR)
		result = comm_create(&comm, config, parent);
	pthread_mutex_lock(&library_lock);
	if (result == ncclSuccess)
		parent->jobs++;
	pthread_mutex_unlock(&library_lock);
	if (result != ncclSuccess) {
		comm_leave(parent);
		return result;
	}
	*job = job_create(run, comm, parent, child);
	if (!*job)
		abort();
	(*job)->color = color;
	(*job)->key = key;
	*child = comm;
	return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config)
{
	struct job *job = NULL;
	ncclResult_t result;
	struct ncclComm *parent = comm_enter_ready(comm, &result);

	if (parent)
		result = prepare(&job, run_split, parent, color, key, child, config);
	return group_note(job ? group_add_job(job) : result);
}

#if FAKE_NCCL_VERSION >= 22700
static ncclResult_t run_shrink(struct job *job)
{
	return derive(job, OP_SHRINK);
}

static ncclResult_t exclude(struct job *job, const int *excluded, int nexcluded)
{
	int i;

	if (!(job->excluded = calloc((size_t)job->parent->nranks, sizeof(*job->excluded))))
		return failed(ncclSystemError, "out of memory");
	for (i = 0; i < nexcluded; i++) {
		if (excluded[i] < 0 || excluded[i] >= job->parent->nranks)
			return failed(ncclInvalidArgument, "shrink: there is no rank %d", excluded[i]);
		if (excluded[i] == job->parent->rank)
			return failed(ncclInvalidUsage, "shrink: an excluded rank must not call it");
		job->nexcluded += !job->excluded[excluded[i]];
		job->excluded[excluded[i]] = true;
	}
	return ncclSuccess;
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int nexcluded, ncclComm_t *child, ncclConfig_t *config, int flags)
{
	struct job *job = NULL;
	struct ncclComm *parent;
	ncclResult_t result = ncclInvalidArgument;
	bool revokes = flags & NCCL_SHRINK_ABORT;

	if (!excluded || nexcluded < 1)
		return group_note(failed(ncclInvalidArgument, "shrink: the ranks to leave out are needed"));
	/* With the abort flag the parent may have failed, which is the purpose of the flag. */
	parent = revokes ? comm_enter(comm) : comm_enter_ready(comm, &result);
	if (!parent)
		return group_note(result);
	result = prepare(&job, run_shrink, parent, 0, 0, child, config);
	if (result != ncclSuccess)
		return group_note(result);
	result = exclude(job, excluded, nexcluded);
	if (result != ncclSuccess) {
		jobs_drop(job);
		return group_note(result);
	}
	if (revokes) {
		pthread_mutex_lock(&library_lock);
		parent->revoked = true;
		parent->async_result = ncclSuccess;
		pthread_mutex_unlock(&library_lock);
		comm_stop(parent, false);
	}
	return group_note(group_add_job(job));
}
#endif
