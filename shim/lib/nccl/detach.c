/* Destroys real communicators; the virtual ones stay.
 *
 * It first waits for threads inside NCCL and for work on the devices, without changing anything. Only then does it destroy
 * communicators. A destroyed one is DETACHED, and NCCL has no thread, socket or shared memory for it any more. It stays
 * DETACHING until a destroy call that exceeds the deadline returns. One that a thread does not leave becomes LIVE again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "command.h"
#include "device.h"
#include "gate.h"
#include "redops.h"
#include "registrations.h"

#define LOOK_AGAIN_US 500

typedef ncclResult_t (*on_comm)(ncclComm_t);
typedef ncclResult_t (*ask_state)(ncclComm_t, ncclResult_t *);

static void wait_a_little(void)
{
	nanosleep(&(struct timespec){0, LOOK_AGAIN_US * 1000}, NULL);
}

static int wait_for_threads(struct nccl_job *job)
{
	char message[128];

	while (!gate_is_drained(message, sizeof(message))) {
		if (!job_in_time(job))
			return job_fails(job, ETIMEDOUT, "%s; nothing was taken down", message);
		wait_a_little();
	}
	return 0;
}

static int wait_for_device(struct nccl_job *job, int device)
{
	int failed;

	if (!device_enter(device))
		return 0; /* no CUDA: destroying drains */
	failed = device_synchronize();
	device_leave(device);
	if (failed)
		return job_fails(job, EIO, "CUDA error %d while the work on device %d ran out; nothing was taken down",
				 failed, device);
	if (!job_in_time(job))
		return job_fails(job, ETIMEDOUT, "the work on device %d took too long; nothing was taken down", device);
	return 0;
}

/* Calls `step` for every record with an id of the request. */
static int each(struct nccl_job *job, int (*step)(struct nccl_job *, struct nccl_comm *, struct nccl_instance *))
{
	struct nccl_instance *instance = real_instance();

	for (const char *at = job->request; *at; at += *at == '\n') {
		char *end;
		uint64_t id = strtoull(at, &end, 16);
		struct nccl_comm *comm;
		int failed = 0;

		if (end == at || (*end && *end != '\n'))
			return job_fails(job, EINVAL, "not an id of a communicator: %.40s", at);
		for (size_t i = 0; (comm = comm_at(i)) && !failed; i++)
			if (comm->id == id && atomic_load(&comm->state) != UNUSED)
				failed = step(job, comm, instance);
		if (failed)
			return failed;
		at = end;
	}
	return 0;
}

static int look(struct nccl_job *job, struct nccl_comm *comm, struct nccl_instance *instance)
{
	ncclResult_t state = ncclSuccess;
	uint64_t before;
	ncclComm_t real;
	unsigned int refused = atomic_load(&comm->refused);

	nccl_lock(&before);
	real = atomic_load(&comm->real);
	if (real) {
		REAL(instance, ncclCommGetAsyncError, ask_state)(real, &state);
		comm_learn(comm, real, instance);
	}
	nccl_unlock(&before);
	/* A communicator whose creation waits at the gate has no real one yet. */
	if (state == ncclInProgress)
		return job_fails(job, EBUSY, "a call on communicator %016lx is still in progress", (unsigned long)comm->id);
	if (refused && real)
		return job_fails(job, EPERM, "communicator %016lx cannot be taken down; the report gives the reason",
				 (unsigned long)comm->id);
	return real ? wait_for_device(job, atomic_load(&comm->device)) : 0;
}

static ncclResult_t destroy(struct nccl_job *job, struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance)
{
	ncclResult_t state = ncclSuccess, result;

	if (!comm_blocks(comm) && !atomic_load(&comm->finalized)) {
		result = REAL(instance, ncclCommFinalize, on_comm)(real);
		while (result == ncclSuccess || result == ncclInProgress) {
			result = REAL(instance, ncclCommGetAsyncError, ask_state)(real, &state);
			if (result != ncclSuccess || state != ncclInProgress)
				break;
			if (!job_in_time(job))
				return REAL(instance, ncclCommAbort, on_comm)(real);
			wait_a_little();
		}
	}
	result = REAL(instance, ncclCommDestroy, on_comm)(real);
	return result == ncclInProgress ? ncclSuccess : result;
}

/* A query may be using the handle for a moment; other calls only if the gate was opened meanwhile. */
static int wait_for_questions(struct nccl_job *job, struct nccl_comm *comm, ncclComm_t real)
{
	char message[128];
	uint64_t before;
	bool doomed;

	while (!gate_is_drained(message, sizeof(message))) {
		if (job_in_time(job)) {
			wait_a_little();
			continue;
		}
		nccl_lock(&before);
		doomed = atomic_load(&comm->doomed); /* the application is done with it, even if a thread is inside */
		if (!doomed) {
			atomic_store(&comm->real, real);
			atomic_store(&comm->state, LIVE);
			held_look_again();
		}
		nccl_unlock(&before);
		return doomed ? 0 :
				job_fails(job, ETIMEDOUT, "%s; communicator %016lx was not taken down", message,
					  (unsigned long)comm->id);
	}
	return 0;
}

static int take_down(struct nccl_job *job, struct nccl_comm *comm, struct nccl_instance *instance)
{
	ncclResult_t result;
	ncclComm_t real = NULL;
	uint64_t before;
	int live = LIVE, doomed, failed;

	nccl_lock(&before);
	if (atomic_compare_exchange_strong(&comm->state, &live, DETACHING)) {
		real = atomic_exchange(&comm->real, NULL);
		if (!real) {
			atomic_store(&comm->state, LIVE); /* has none: non-blocking, not ready */
			held_look_again();
		}
	}
	nccl_unlock(&before);
	if (!real)
		return 0;
	failed = wait_for_questions(job, comm, real);
	if (failed)
		return failed;
	redops_detach(comm, real, instance);
	nccl_lock(&before);
	registrations_detach(comm, real, instance);
	nccl_unlock(&before);
	result = destroy(job, comm, real, instance);
	if (result != ncclSuccess)
		failed = job_fails(job, EIO, "communicator %016lx: ncclCommDestroy failed with NCCL error %d",
				   (unsigned long)comm->id, (int)result);
	nccl_lock(&before);
	atomic_store(&comm->state, DETACHED);
	held_look_again();
	doomed = atomic_load(&comm->doomed);
	nccl_unlock(&before);
	if (doomed) {
		redops_forget(comm);
		comm_end(comm, doomed == 2);
	}
	return failed;
}

int detach(struct nccl_job *job)
{
	int failed;

	if (!real_instance())
		return job_fails(job, ENOENT, "the process has loaded no NCCL");
	if (atomic_load(&gate_word) != GATE_CLOSED)
		return job_fails(job, EPERM, "the gate is open");
	failed = wait_for_threads(job);
	if (!failed)
		failed = each(job, look);
	if (!failed && !job_in_time(job))
		failed = job_fails(job, ETIMEDOUT, "no time left; nothing was taken down");
	return failed ? failed : each(job, take_down);
}
