/* The threads that carry out the daemon's commands about NCCL, one for each command. dispatch.c starts them and waits. */
#define _GNU_SOURCE
#include "command.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "core/shim.h"
#include "device.h"
#include "exit_functions.h"
#include "gate.h"
#include "ids.h"
#include "rdma.h"

static int fail_late(struct nccl_job *job)
{
	return job_fails(job, ECANCELED, "a later command has changed the gate");
}

/* "ID c|s|r PEER COUNT"; a permission has "permit THREAD PASSED " before it. */
static bool read_target(const char *line, struct gate_target *target)
{
	unsigned long id, launched;
	char channel;
	int peer;

	if (sscanf(line, "%lx %c %d %lu", &id, &channel, &peer, &launched) != 4 || !strchr("csr", channel))
		return false;
	*target = (struct gate_target){id, (enum gate_channel)channel, peer, launched};
	return true;
}

static bool read_permission(const char *line, struct gate_permission *permission)
{
	unsigned long passed;
	int thread, read = 0;

	if (sscanf(line, "permit %d %lu %n", &thread, &passed, &read) != 2 || !read_target(line + read, &permission->until))
		return false;
	permission->thread = thread;
	permission->passed = passed;
	return true;
}

static int set_targets(struct nccl_job *job)
{
	size_t lines = 1, count = 0, allowed = 0;
	struct gate_permission *permissions;
	struct gate_target *targets;
	char *rest = job->request, *line;
	int failed = 0;

	for (const char *at = job->request; *at; at++)
		lines += *at == '\n';
	targets = calloc(lines, sizeof(*targets));
	permissions = calloc(lines, sizeof(*permissions));
	if (!targets || !permissions)
		failed = job_fails(job, ENOMEM, "out of memory for %zu targets", lines);
	while (!failed && (line = job_line(&rest))) {
		if (read_permission(line, &permissions[allowed]))
			allowed++;
		else if (read_target(line, &targets[count]))
			count++;
		else
			failed = job_fails(job, EINVAL, "not a target ([permit THREAD PASSED] ID c|s|r PEER COUNT): %.60s",
					   line);
	}
	if (failed) {
		free(targets);
		free(permissions);
		return failed;
	}
	return gate_set_targets(job->number, targets, count, permissions, allowed) ? 0 : fail_late(job);
}

static int open_gate(struct nccl_job *job)
{
	bool abandon = strcmp(job->request, "abandon") == 0;
	uint64_t missing = 0;
	int status;

	if (!abandon && *job->request)
		return job_fails(job, EINVAL, "not \"abandon\": %.60s", job->request);
	status = gate_open(job->number, abandon, &missing);
	if (status == EBUSY)
		return job_fails(job, EBUSY, "communicator %016lx is not attached: the gate stays closed",
				 (unsigned long)missing);
	return status ? fail_late(job) : 0;
}

static int new_id(struct nccl_job *job)
{
	struct nccl_instance *instance = real_instance();
	ncclUniqueId id;
	ncclResult_t result;

	if (!instance)
		return job_fails(job, ENOENT, "the process has loaded no NCCL");
	result = REAL(instance, ncclGetUniqueId, ncclResult_t (*)(ncclUniqueId *))(&id);
	if (result != ncclSuccess)
		return job_fails(job, EIO, "ncclGetUniqueId failed with NCCL error %d", (int)result);
	id_made(&id); /* until a communicator was attached with it */
	job->reply = malloc(2 * sizeof(id) + 1);
	if (!job->reply)
		return job_fails(job, ENOMEM, "no memory");
	for (size_t i = 0; i < sizeof(id); i++)
		snprintf(job->reply + 2 * i, 3, "%02x", (unsigned char)id.internal[i]);
	job->reply_bytes = 2 * sizeof(id);
	return 0;
}

#define DEVICES 64
#define DEVICE_LINE 64

/* Answers "DEVICE BUS-ID", a line for each device that a communicator is on, as CUDA in this process names it. */
static int devices(struct nccl_job *job)
{
	bool seen[DEVICES] = {false};
	struct nccl_comm *comm;

	job->reply = malloc((size_t)DEVICES * DEVICE_LINE);
	if (!job->reply)
		return job_fails(job, ENOMEM, "no memory");
	job->reply[0] = 0;
	for (size_t i = 0; (comm = comm_at(i)); i++) {
		int device = atomic_load(&comm->device), state = atomic_load(&comm->state);
		char bus_id[32] = "";

		if (state == UNUSED || device < 0 || device >= DEVICES || seen[device])
			continue;
		seen[device] = true;
		if (device_bus_id(device, bus_id, sizeof(bus_id)))
			job->reply_bytes +=
				(size_t)snprintf(job->reply + job->reply_bytes, DEVICE_LINE, "%d %.31s\n", device, bus_id);
	}
	return 0;
}

static int must_be_detached(struct nccl_job *job)
{
	struct nccl_comm *comm;

	for (size_t i = 0; (comm = comm_at(i)); i++) {
		int state = atomic_load(&comm->state);

		/* A communicator whose creation waits at the gate will be created by the fresh copy. */
		if (state != UNUSED && state != DETACHED && state != LOST && (state != PENDING || atomic_load(&comm->real)))
			return job_fails(job, EBUSY, "communicator %016lx is not detached", (unsigned long)comm->id);
	}
	return 0;
}

static int load_fresh(struct nccl_job *job)
{
	char message[MESSAGE_BYTES];
	int failed;

	if (must_be_detached(job))
		return job->status;
	while (!gate_is_drained(message, sizeof(message))) {
		if (!job_in_time(job))
			return job_fails(job, ETIMEDOUT, "%s", message);
		pause_us(500);
	}
	failed = real_load_fresh(message, sizeof(message));
	return failed ? job_fails(job, failed, "%s", message) : 0;
}

static bool is_released(void)
{
	struct nccl_instance *instance = real_instance();

	return instance && LOAD(&instance->released);
}

/* If RDMA devices or RAS of the current instance were closed under it, no call may reach it any more. */
static int renew(struct nccl_job *job)
{
	if (!is_released())
		return 0;
	if (job_claim_loading(job))
		return job->status;
	return is_released() ? load_fresh(job) : 0; /* another command may have done it */
}

static int close_devices(struct nccl_job *job)
{
	if (atomic_load(&gate_word) != GATE_CLOSED)
		return job_fails(job, EPERM, "the gate is open");
	if (LOAD(&snapshim_mailbox.parked))
		return job_fails(job, EBUSY, "the job is parked, so NCCL's threads cannot end");
	if (must_be_detached(job) || rdma_release(job))
		return job->status;
	exit_functions_release(job); /* the event threads of devices are gone, so those that are left are of RAS */
	return 0;
}

static int act(struct nccl_job *job)
{
	switch (job->command) {
	case SNAPSHIM_NCCL_CLOSE:
		return gate_close(job->number) ? 0 : fail_late(job);
	case SNAPSHIM_NCCL_TARGETS:
		return set_targets(job);
	case SNAPSHIM_NCCL_REPORT:
		return report(job);
	case SNAPSHIM_NCCL_OPEN:
		if (renew(job))
			return job->status;
		return open_gate(job);
	case SNAPSHIM_NCCL_DETACH:
		return detach(job);
	case SNAPSHIM_NCCL_NEW_ID:
		return renew(job) ? job->status : new_id(job);
	case SNAPSHIM_NCCL_FRESH:
		return job_claim_loading(job) ? job->status : load_fresh(job);
	case SNAPSHIM_NCCL_CLOSE_DEVICES:
		return close_devices(job);
	case SNAPSHIM_NCCL_DEVICES:
		return devices(job);
	default:
		return renew(job) ? job->status : attach(job);
	}
}

void *job_run(void *given)
{
	struct nccl_job *job = given;
	int32_t *slot = NULL;
	uint64_t reserved = (uint64_t)1 << (SNAPSHIM_SIGNAL - 1);

	/* This thread is never parked. NCCL's threads inherit its mask; those can be parked. */
	for (int i = 0; i < SNAPSHIM_EXEMPT_MAX && !slot; i++) {
		int32_t none = 0;

		if (SWAP_IF(&snapshim_mailbox.exempt[i], &none, self_tid()))
			slot = &snapshim_mailbox.exempt[i];
	}
	free(job->stale);
	set_signal_mask(~reserved);
	prctl(PR_SET_NAME, "snapshim-nccl");
	act(job);
	job_over(job);
	/* From here on PARK waits until it has ended. Parked, it would be taken for a thread of NCCL, by what is on its stack. */
	set_signal_mask(~(uint64_t)0);
	if (slot)
		STORE(slot, 0);
	STORE(&job->done, 1);
	wake_word(&job->done);
	job_let_go(job);
	return NULL;
}

void *job_cancel(void *given)
{
	set_signal_mask(~((uint64_t)1 << (SNAPSHIM_SIGNAL - 1)));
	attach_cancel(given);
	job_let_go(given);
	return NULL;
}
