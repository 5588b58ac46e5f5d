/* Communicators made from unique ids. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "communicator.h"
#include "faults.h"
#include "rendezvous.h"

static ncclResult_t run_init(struct job *job)
{
	const struct cancel cancel = job_cancel(job);
	ncclResult_t result = fault_at("init", job->comm->rank, job->comm);
	int i;

	if (result == ncclSuccess)
		return bootstrap_by_ids(job->comm, job->ids, job->nids, &cancel);
	for (i = 0; i < job->nids; i++)
		rendezvous_settle(rendezvous_number(&job->ids[i]), true);
	return result;
}

static ncclResult_t initialise(ncclComm_t *handle, int nranks, const ncclUniqueId *ids, int nids, int rank,
			       const ncclConfig_t *config)
{
	struct ncclComm *comm;
	struct job *job;
	ncclResult_t result;

	if (!handle || !ids || nids < 1)
		return group_note(failed(ncclInvalidArgument, "a handle to fill and at least one id are needed"));
	*handle = NULL;
	if (nranks < 1 || rank < 0 || rank >= nranks)
		return group_note(failed(ncclInvalidArgument, "there is no rank %d among %d", rank, nranks));
	if ((result = comm_create(&comm, config, NULL)) != ncclSuccess)
		return group_note(result);
	pthread_mutex_lock(&library_lock); /* it is already listed, and other threads read the list */
	comm->id = rendezvous_number(&ids[0]);
	comm->rank = rank;
	comm->nranks = nranks;
	pthread_mutex_unlock(&library_lock);
	job = job_create(run_init, comm, NULL, handle);
	if (job)
		job->ids = malloc((size_t)nids * sizeof(*ids));
	if (!job || !job->ids)
		abort();
	memcpy(job->ids, ids, (size_t)nids * sizeof(*ids));
	job->nids = nids;
	*handle = comm;
	return group_note(group_add_job(job));
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
	return initialise(comm, nranks, &id, 1, rank, NULL);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
	return initialise(comm, nranks, &id, 1, rank, config);
}

#if FAKE_NCCL_VERSION >= 22300
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int nids, ncclUniqueId *ids,
				      ncclConfig_t *config)
{
	return initialise(comm, nranks, ids, nids, rank, config);
}
#endif

/* Calls the exported symbols, so that a preloaded library is entered again. */
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devices)
{
	int before = fakeNcclChosenDevice(), i;
	ncclUniqueId id;
	ncclResult_t result, ended;

	if (!comms || ndev < 1)
		return group_note(failed(ncclInvalidArgument, "at least one device and a handle for each are needed"));
	if ((result = ncclGetUniqueId(&id)) != ncclSuccess)
		return group_note(result);
	group_start();
	for (i = 0; i < ndev && result == ncclSuccess; i++) {
		fakeNcclSetDevice(devices ? devices[i] : i);
		result = ncclCommInitRank(&comms[i], ndev, id, i);
		if (result == ncclInProgress)
			result = ncclSuccess;
	}
	fakeNcclSetDevice(before);
	group_note(result);
	ended = group_end();
	if (result == ncclSuccess)
		result = ended;
	if (result != ncclSuccess)
		rendezvous_settle(rendezvous_number(&id), true);
	return result;
}
