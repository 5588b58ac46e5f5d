/* The thread that executes a communicator's operations, in the order in which they were launched.
 *
 * Invariant: an operation's position on its stream is released when the operation is done or its communicator is
 * stopped, never because it failed. After an asynchronous error the stream waits until the communicator is aborted, as
 * it does when a kernel waits for a dead peer.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "communicator.h"
#include "faults.h"

static void batch_free(struct batch *batch)
{
	struct operation *operation;

	while ((operation = batch->operations)) {
		batch->operations = operation->next;
		if (operation->ticket)
			fakeNcclTicketLeave(operation->ticket);
		free(operation);
	}
	free(batch);
}

/* Notifies all members, or those on this host, that this rank is done, and waits until they are done too. */
static ncclResult_t say_goodbye(struct ncclComm *comm, const struct batch *batch, const struct cancel *cancel)
{
	struct transfer *transfers = calloc(2 * (size_t)comm->nranks, sizeof(*transfers));
	uint64_t host = comm->members[comm->rank].host;
	size_t count = 0;
	ncclResult_t result;
	int peer;

	if (!transfers)
		return failed(ncclSystemError, "out of memory");
	for (peer = 0; peer < comm->nranks; peer++) {
		if (peer == comm->rank || (batch->same_host && comm->members[peer].host != host))
			continue;
		transfers[count++] = (struct transfer){.peer = peer, .signature.opcode = OP_FINALIZE, .sending = true};
		transfers[count++] = (struct transfer){.peer = peer, .signature.opcode = OP_FINALIZE};
	}
	result = links_run(comm->data, comm->nranks, transfers, count, true, cancel);
	free(transfers);
	return result;
}

static ncclResult_t batch_run(struct ncclComm *comm, const struct batch *batch)
{
	const struct cancel cancel = {.fds = {comm->stop_fd}, .count = 1};
	const struct operation *operation;
	ncclResult_t result;

	if (batch->finalize) {
		/* The fault point belongs to ncclCommFinalize; ncclCommDestroy has another one. */
		result = batch->same_host ? ncclSuccess : fault_at("finalize", comm->rank, comm);
		return result == ncclSuccess ? say_goodbye(comm, batch, &cancel) : result;
	}
	for (operation = batch->operations; operation; operation = operation->next)
		if (!fakeNcclTicketAwait(operation->ticket, &comm->stopped))
			return failed(ncclInternalError, "aborted while waiting for the stream");
	for (operation = batch->operations; operation; operation = operation->next) {
		result = fault_running(opcode_name(operation->opcode), comm->rank, comm);
		if (result != ncclSuccess)
			return result;
	}
	return operations_run(comm, batch, &cancel);
}

static void *work(void *argument)
{
	struct ncclComm *comm = argument;
	struct batch *batch;
	bool last = false;

	pthread_mutex_lock(&library_lock);
	while (!last) {
		ncclResult_t result;

		while (!comm->batches && !atomic_load(&comm->stopped))
			pthread_cond_wait(&library_changed, &library_lock);
		if (atomic_load(&comm->stopped))
			break;
		batch = comm->batches;
		pthread_mutex_unlock(&library_lock);
		result = batch_run(comm, batch);
		pthread_mutex_lock(&library_lock);
		if (result == ncclSuccess) {
			last = batch->finalize;
			comm->batches = batch->next;
			batch_free(batch);
			continue;
		}
		if (!atomic_load(&comm->stopped))
			comm_fail(comm, result);
		while (!atomic_load(&comm->stopped))
			pthread_cond_wait(&library_changed, &library_lock);
	}
	while ((batch = comm->batches)) {
		comm->batches = batch->next;
		batch_free(batch);
	}
	links_close(comm->data, comm->nranks, last);
	if (last) {
		links_close(comm->control, comm->nranks, last);
		comm->finalized = true;
	}
	comm->worker_done = true;
	pthread_cond_broadcast(&library_changed);
	pthread_mutex_unlock(&library_lock);
	return NULL;
}

void worker_give(struct ncclComm *comm, struct batch *batch)
{
	struct batch **end;

	for (end = &comm->batches; *end; end = &(*end)->next)
		;
	*end = batch;
	pthread_cond_broadcast(&library_changed);
}

ncclResult_t worker_start(struct ncclComm *comm)
{
	comm->worker_started = start_thread(&comm->worker, work, comm, "nccl-worker");
	return comm->worker_started ? ncclSuccess : failed(ncclSystemError, "cannot start a thread");
}
