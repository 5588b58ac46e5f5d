/* The mailbox's commands about device memory: the control thread's side.
 *
 * Invariant: `device_offloaded` is 1 from before the first physical memory is released until all of it is back with its
 * content; after any failure in between FILL can be retried. Everything that READY created, except for sleeping threads, is
 * released when OFFLOAD or FILL has answered, so that a dump does not contain it; only EAGAIN and EBUSY leave it for a
 * retry. Nothing here takes a lock of libc, because the job may be parked.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "handover.h"
#include "readiness.h"
#include "sharing/sharing.h"
#include "stripes.h"

#define REHEARSAL_NS 1000000000	 /* takes milliseconds, unless a parked thread holds a lock */
#define TAKE_AWAY_NS 60000000000 /* to release all physical memory, which cannot be stopped half-way */

static void mark_striped(bool offloads)
{
	for (size_t i = 0; i < blocks_count(); i++)
		block_at(i)->striped = offloads && block_at(i)->counted;
}

static bool any_is_away(void)
{
	for (size_t i = 0; i < blocks_count(); i++)
		if (block_at(i)->away)
			return true;
	return false;
}

static int copy(int (*task)(struct worker *), int64_t until_ns)
{
	int64_t began = now_ns();
	int status;

	memset(snapshim_mailbox.device_done, 0, sizeof(snapshim_mailbox.device_done));
	status = explain(workers_run(stripes.count, task, until_ns));
	snapshim_mailbox.result[0] = striped_bytes();
	snapshim_mailbox.result[1] = (uint64_t)(now_ns() - began);
	return status;
}

/* Called before any memory is released. EAGAIN: release the job for a moment, so that the call that hangs returns. */
static int rehearse_all(int64_t until_ns)
{
	int64_t soon_ns = now_ns() + REHEARSAL_NS;
	int status;

	if (!contexts_hold(until_ns))
		return refuse(EAGAIN, "a thread of the job is ending a CUDA context");
	status = stripes.invalid ? 0 : workers_finish(1, rehearse, soon_ns < until_ns ? soon_ns : until_ns);
	let_contexts_go(status);
	if (status == EINPROGRESS || status == ETIMEDOUT)
		return refuse(EAGAIN,
			      "a thread is parked in the middle of a call into CUDA, with a lock that others wait for");
	return explain(status);
}

/* Called while all memory is still mapped: a call that hangs here returns when the job is released. */
static int clean_up_all(int64_t by_ns)
{
	int status;

	if (!contexts_hold(by_ns))
		return refuse(EBUSY, "a thread of the job is ending a CUDA context");
	status = workers_finish(stripes.count, clean_up, by_ns);
	let_contexts_go(status);
	return explain(status);
}

/* Pages that a write adds to a file are charged to the job's cgroup, whose limit could kill it. So a preallocated file must
 * have all its room before anything is copied. Empty files grow. The answer does not use `device_done`, because that is
 * what may be sent. */
static bool files_suffice(void)
{
	uint64_t all = 0, most = 0;
	bool suffice = true;

	for (unsigned int i = 0; i < stripes.count; i++) {
		uint64_t bytes = stripe_bytes(i);
		struct stat about;

		all += bytes;
		most = bytes > most ? bytes : most;
		if (handover_is_ours(i) && fstat(handover_file(i), &about) == 0 && about.st_size &&
		    (uint64_t)about.st_size < bytes)
			suffice = false;
	}
	snapshim_mailbox.result[0] = all;
	snapshim_mailbox.result[1] = most;
	return suffice;
}

/* What precedes OFFLOAD and HAND_OVER. After EAGAIN and EBUSY everything that READY made is kept. */
static int begin(int64_t until_ns, bool *may_retry)
{
	int status;

	*may_retry = true;
	if (LOAD(&snapshim_mailbox.device_offloaded))
		return refuse(EALREADY, "the memory is offloaded already");
	if (!LOAD(&snapshim_mailbox.parked))
		return refuse(EBUSY, "the job's threads are not parked");
	if (memory_calls_open()) {
		add_number((long)memory_calls_open());
		add_text(" threads are parked in the middle of allocating or freeing device memory");
		return EAGAIN;
	}
	status = rehearse_all(until_ns);
	if (!status)
		status = prepare_all(until_ns);
	if (status == EAGAIN)
		return status;
	*may_retry = false;
	if (!status)
		status = explain(workers_run(1, drop_freed, until_ns));
	if (!status)
		mark_striped(true);
	return status;
}

/* What follows OFFLOAD and HAND_OVER: the content, or the memory itself, is safe if `status` is 0. */
static int let_go(int status)
{
	if (!status)
		status = clean_up_all(now_ns() + CLEAN_UP_NS);
	if (!status) {
		offloaded_as.count = stripes.count;
		offloaded_as.slot_bytes = stripes.slot_bytes;
		STORE(&snapshim_mailbox.device_offloaded, 1);
		status = explain(workers_finish(stripes.count, detach_all, now_ns() + TAKE_AWAY_NS));
		if (status != ETIMEDOUT && status && !any_is_away())
			STORE(&snapshim_mailbox.device_offloaded, 0);
	}
	if (status && !LOAD(&snapshim_mailbox.device_offloaded))
		mark_striped(false);
	return settled(status, now_ns() + CLEAN_UP_NS);
}

static int offload_memory(int64_t until_ns)
{
	bool may_retry;
	int status = begin(until_ns, &may_retry);

	if (status && may_retry)
		return status;
	if (!status && !files_suffice()) {
		mark_striped(false);
		return refuse(EFBIG, "there is more device memory than the stripe files have room for");
	}
	return let_go(status ? status : copy(copy_out, until_ns));
}

static int hand_over_memory(int64_t until_ns)
{
	bool may_retry;
	int status = begin(until_ns, &may_retry);

	if (status && may_retry)
		return status;
	if (!status)
		status = explain(workers_run(1, own_all, until_ns));
	if (!status)
		status = explain(workers_run(1, hand_over, until_ns));
	snapshim_mailbox.result[0] = striped_bytes();
	return let_go(status);
}

/* What follows FILL and TAKE_BACK. */
static int taken(int status)
{
	int64_t by_ns = now_ns() + CLEAN_UP_NS;

	if (!status) {
		mark_striped(false);
		STORE(&snapshim_mailbox.device_offloaded, 0);
	} else if (workers_are_back()) {
		workers_finish(stripes.count, detach_all, by_ns);
	}
	return settled(status, by_ns);
}

/* ENOMEM: there is no room for it. What was not replaced stays as it is, and counts as imported. */
static int own_memory(int64_t until_ns)
{
	int status;

	if (!LOAD(&snapshim_mailbox.parked))
		return refuse(EBUSY, "the job's threads are not parked");
	if (LOAD(&snapshim_mailbox.device_offloaded))
		return refuse(EALREADY, "the memory is offloaded");
	status = prepare_all(until_ns);
	if (!status)
		status = explain(workers_run(1, own_all, until_ns));
	return settled(status, now_ns() + CLEAN_UP_NS);
}

static int take_back_memory(int64_t until_ns)
{
	int status;

	if (!LOAD(&snapshim_mailbox.device_offloaded))
		return refuse(EALREADY, "no memory is offloaded");
	status = prepare_all(until_ns);
	if (!status) /* what an attempt that did not end has mapped */
		status = explain(workers_finish(stripes.count, detach_all, now_ns() + TAKE_AWAY_NS));
	if (!status)
		status = explain(workers_run(1, take_back, until_ns));
	snapshim_mailbox.result[0] = striped_bytes();
	return taken(status);
}

static int fill_memory(int64_t until_ns)
{
	int status;

	if (!LOAD(&snapshim_mailbox.device_offloaded))
		return refuse(EALREADY, "no memory is offloaded");
	status = prepare_all(until_ns);
	if (!status)
		status = explain(workers_run(stripes.count, attach_all, until_ns));
	if (!status)
		status = copy(copy_in, until_ns);
	return taken(status);
}

int memory_dispatch(uint32_t command, int64_t timeout_ns)
{
	int64_t until_ns = now_ns() + timeout_ns;

	if (!earlier_calls_are_back())
		return refuse(EBUSY, "a call into CUDA of an earlier command has not returned");
	if (command >= SNAPSHIM_MEMORY_IPC_TRY)
		return sharing_dispatch(command, until_ns);
	if (command == SNAPSHIM_MEMORY_OPEN)
		return open_sockets();
	if (command == SNAPSHIM_MEMORY_DROP)
		return give_up();
	if (command == SNAPSHIM_MEMORY_READY)
		return make_ready(until_ns);
	if (command == SNAPSHIM_MEMORY_OWN && !LOAD(&snapshim_mailbox.device_imported))
		return 0;
	if (!is_ready())
		return refuse(EINVAL, "MEMORY_READY comes first");
	if (is_ready_to_hold() != (command >= SNAPSHIM_MEMORY_HAND_OVER))
		return refuse(EINVAL, "MEMORY_READY was asked for the other way");
	switch (command) {
	case SNAPSHIM_MEMORY_OFFLOAD:
		return offload_memory(until_ns);
	case SNAPSHIM_MEMORY_HAND_OVER:
		return hand_over_memory(until_ns);
	case SNAPSHIM_MEMORY_TAKE_BACK:
		return take_back_memory(until_ns);
	case SNAPSHIM_MEMORY_OWN:
		return own_memory(until_ns);
	default:
		return fill_memory(until_ns);
	}
}

/* In a forked child: the memory, the threads and what they copy to are its parent's. */
void memory_forget(void)
{
	readiness_forget();
	holding_forget();
	resources_forget();
	workers_forget();
	peers_forget();
	ipc_forget();
	sharing_forget();
	backing_forget();
	contexts_forget();
	memory_calls_forget();
	blocks_forget();
	snapshim_mailbox.device_offloaded = 0;
	snapshim_mailbox.device_imported = 0;
	snapshim_mailbox.ipc_exports_that_move = 0;
	snapshim_mailbox.ipc_imports_that_move = 0;
	snapshim_mailbox.ipc_server = 0;
	memset(snapshim_mailbox.ipc_opened_from, 0, sizeof(snapshim_mailbox.ipc_opened_from));
	snapshim_mailbox.ipc_closed = 0;
	snapshim_mailbox.ipc_outside = 0;
	snapshim_mailbox.device_stripes = 0;
	snapshim_mailbox.device_cancel = 0;
	memset(snapshim_mailbox.device_done, 0, sizeof(snapshim_mailbox.device_done));
}
