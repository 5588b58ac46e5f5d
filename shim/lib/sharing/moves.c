/* The mailbox's commands about memory that processes share (CUDA IPC).
 *
 * The driver restores no process that has memory of another one. So that memory is unmapped before its checkpoint, and mapped at
 * the same addresses where the processes go on, from what their owners have then.
 *
 * Invariant: `ipc_closed` is not 0 from before the first mapping is removed until all are there again, and no thread of the job
 * runs meanwhile. Before anything is unmapped, IPC_TRY has made each kind of call once: a call that a parked thread blocks would
 * return only when that thread is released. Nothing here takes a lock of libc that a parked thread may hold.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>

#include "memory/ipc.h"
#include "memory/ipc_opened.h"
#include "memory/ipc_server.h"
#include "memory/memory.h"
#include "memory/readiness.h"
#include "memory/stripes.h"
#include "sharing.h"

#define TRY_NS 1000000000    /* takes milliseconds, unless a parked thread holds a lock */
#define CLOSE_NS 60000000000 /* cannot be stopped half-way */

static int explain_one(int status)
{
	if (status == EINPROGRESS)
		return refuse(ETIMEDOUT, "a call into CUDA did not return in time");
	if (status && workers[0].status == status && workers[0].call && !snapshim_mailbox.text[0]) {
		add_text(workers[0].call);
		add_text(" ");
		add_number(workers[0].answer);
	}
	return status;
}

static bool hold_records(int64_t until_ns)
{
	while (pthread_mutex_trylock(&ipc_opening) != 0) {
		if (LOAD(&snapshim_mailbox.parked) || now_ns() >= until_ns)
			return false;
		pause_us(100);
	}
	return true;
}

static bool any_is_away(void)
{
	for (const struct opened *record = ipc_opened; record; record = record->next)
		if (record->address && record->away)
			return true;
	return false;
}

/* ---------------------------------------------------------------- IPC_TRY */

/* The context and a device of memory that is shared. Under the lock for contexts. */
static bool some_place(void **context, int *device)
{
	for (const struct opened *record = ipc_opened; record; record = record->next)
		if (record->address && record->access) {
			*context = record->context;
			*device = __builtin_ctzll(record->access);
			return true;
		}
	if (!LOAD(&snapshim_mailbox.parked))
		return false; /* the table may change */
	for (size_t i = 0; i < blocks_count(); i++)
		if (block_at(i)->exported) {
			*context = block_at(i)->context;
			*device = block_at(i)->device;
			return true;
		}
	return false;
}

static int try_in_contexts(struct worker *worker)
{
	struct cuda_property property;
	struct block block = {.away = true};
	size_t grain = 0;
	int status, answer, left = 0;
	void *context;

	stay_out_of_captures();
	status = rehearse_lock(worker);
	if (status || !some_place(&context, &block.device))
		return status;
	if (driver()->cuCtxSetCurrent(context) == 0) /* it may have ended: what follows needs none */
		status = take_lock(worker);
	if (status)
		return status;
	block.access = (uint64_t)1 << block.device;
	property = property_on(block.device);
	status = CUDA(worker, cuMemGetAllocationGranularity, &grain, &property, MINIMUM_GRANULARITY);
	block.bytes = grain;
	if (!status)
		status = CUDA(worker, cuMemAddressReserve, &block.address, block.bytes, 0, 0, 0);
	if (status)
		return status;
	answer = physical_attach(&block);
	if (answer && answer != CUDA_OUT_OF_MEMORY) /* opening memory needs no room */
		status = worker_fails(worker, EIO, "cuMemCreate, cuMemMap or cuMemSetAccess answers", answer);
	if (!block.away)
		left |= physical_detach(&block);
	left |= CUDA(worker, cuMemAddressFree, block.address, block.bytes);
	return status ? status : left ? EIO : 0;
}

/* The worker itself holds the lock: a call that does not return in time must not leave it to a command that may never come,
 * for which a thread of a running job would wait. */
static int try_calls(struct worker *worker)
{
	int status;

	if (!contexts_hold(now_ns() + TRY_NS))
		return worker_fails(worker, EAGAIN, "a thread of the job is ending a CUDA context", 0);
	status = try_in_contexts(worker);
	contexts_let_go();
	return status;
}

static int find_owners(struct worker *worker)
{
	for (const struct opened *record = ipc_opened; record; record = record->next) {
		int descriptor = record->address ? ipc_server_ask(record->server, record->number, 0) : 0;

		if (descriptor < 0)
			return worker_fails(worker, ENOENT,
					    "no process offers memory that is open here, bytes:", (long)record->bytes);
		if (descriptor)
			KERNEL(SYS_close, descriptor);
	}
	return 0;
}

static int try_all(int64_t until_ns)
{
	int64_t soon_ns = now_ns() + TRY_NS;
	int status;

	if (LOAD(&snapshim_mailbox.parked) ? !ipc_server_close_to_others() : LOAD(&snapshim_mailbox.ipc_outside))
		return refuse(EXDEV, "a process of another rank, or of none, has got memory of this process");
	status = workers_finish(1, try_calls, soon_ns < until_ns ? soon_ns : until_ns);
	if (status == EINPROGRESS || status == ETIMEDOUT)
		return refuse(EAGAIN,
			      "a thread is parked in the middle of a call into CUDA, with a lock that others wait for");
	if (!status)
		status = workers_run(1, find_owners, until_ns);
	return explain_one(status);
}

/* ---------------------------------------------------------------- IPC_CLOSE */

static int close_all(struct worker *worker)
{
	stay_out_of_captures();
	for (struct opened *record = ipc_opened; record; record = record->next) {
		int status;

		if (!record->address || record->away)
			continue;
		driver()->cuCtxSetCurrent(record->context);
		status = CUDA(worker, cuMemUnmap, record->address, record->bytes);
		if (status)
			return status;
		record->away = record->times != 0;
		if (record->times)
			continue;
		driver()->cuMemAddressFree(record->address, record->bytes);
		ipc_forget_opened(record); /* the program has closed it during a capture */
	}
	return 0;
}

static int close_memory(void)
{
	int status;

	if (!LOAD(&snapshim_mailbox.parked))
		return refuse(EBUSY, "the job's threads are not parked");
	(void)ipc_server_close_to_others(); /* IPC_TRY has looked whether one has something; an undo must not depend on it */
	ipc_must_open(SNAPSHIM_IPC_NOT_OPEN);
	status = workers_finish(1, close_all, now_ns() + CLOSE_NS);
	if (status != EINPROGRESS && !any_is_away())
		ipc_is_open(SNAPSHIM_IPC_NOT_OPEN);
	return explain_one(status);
}

/* ---------------------------------------------------------------- IPC_OFFER, IPC_OPEN */

static int offer_memory(int64_t until_ns)
{
	int status;

	if (LOAD(&snapshim_mailbox.device_offloaded))
		return refuse(EBUSY, "the job's device memory is offloaded");
	if (!(LOAD(&snapshim_mailbox.ipc_closed) & SNAPSHIM_IPC_NOT_OFFERED))
		return 0;
	status = workers_run(1, ipc_offer_all, until_ns);
	if (!status)
		ipc_is_open(SNAPSHIM_IPC_NOT_OFFERED);
	return explain_one(status);
}

/* On another node the GPUs may not reach each other: the device where the memory was opened must. */
static int allow_again(struct worker *worker, const struct opened *record)
{
	int needed = __builtin_ctzll(record->access), status = 0;

	driver()->cuCtxGetDevice(&needed);
	for (int device = 0; device < DEVICES_MAX && !status; device++)
		if (record->access >> device & 1) {
			struct cuda_access access = {{ON_DEVICE, device}, READ_AND_WRITE};
			int answer = driver()->cuMemSetAccess(record->address, record->bytes, &access, 1);

			if (answer && device == needed)
				status = worker_fails(worker, EIO, "cuMemSetAccess answers", answer);
		}
	return status;
}

static int map_again(struct worker *worker, struct opened *record, int descriptor)
{
	uint64_t handle;
	int status;

	driver()->cuCtxSetCurrent(record->context);
	status = CUDA(worker, cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)descriptor, POSIX_DESCRIPTOR);
	if (status)
		return status;
	status = CUDA(worker, cuMemMap, record->address, record->bytes, 0, handle, 0);
	if (!status) {
		status = allow_again(worker, record);
		if (status)
			driver()->cuMemUnmap(record->address, record->bytes);
	}
	driver()->cuMemRelease(handle); /* the mapping keeps it */
	record->away = status != 0;
	return status;
}

static int open_all(struct worker *worker)
{
	int status = 0;

	stay_out_of_captures();
	for (struct opened *record = ipc_opened; record && !status; record = record->next) {
		int descriptor;

		if (!record->address || !record->away)
			continue;
		descriptor = ipc_server_ask(record->server, record->number, 0);
		if (descriptor < 0)
			return worker_fails(worker, ENOENT,
					    "no process offers memory that was open here, bytes:", (long)record->bytes);
		status = map_again(worker, record, descriptor);
		KERNEL(SYS_close, descriptor);
		if (!status)
			status = worker_should_stop();
	}
	return status;
}

static int open_memory(int64_t until_ns)
{
	int status;

	if (!(LOAD(&snapshim_mailbox.ipc_closed) & SNAPSHIM_IPC_NOT_OPEN))
		return 0;
	status = workers_run(1, open_all, until_ns);
	if (!status)
		ipc_is_open(SNAPSHIM_IPC_NOT_OPEN);
	return explain_one(status);
}

/* ---------------------------------------------------------------- */

int sharing_dispatch(uint32_t command, int64_t until_ns)
{
	int status;

	if (!driver())
		return 0; /* nothing can be shared */
	if (LOAD(&snapshim_mailbox.parked) && memory_calls_open()) {
		add_number((long)memory_calls_open());
		add_text(" threads are parked in the middle of a call that changes device memory");
		return EAGAIN;
	}
	status = workers_start(1);
	if (status)
		return refuse(status, "no thread of ours can be started in this process now: a limit of processes "
				      "(ulimit -u, pids.max) is reached, or the driver has too many threads");
	if (!hold_records(until_ns))
		return refuse(EAGAIN, "a thread is in the middle of opening or closing memory of another process");
	switch (command) {
	case SNAPSHIM_MEMORY_IPC_TRY:
		status = try_all(until_ns);
		break;
	case SNAPSHIM_MEMORY_IPC_CLOSE:
		status = close_memory();
		break;
	case SNAPSHIM_MEMORY_IPC_OFFER:
		status = offer_memory(until_ns);
		break;
	default:
		status = open_memory(until_ns);
	}
	pthread_mutex_unlock(&ipc_opening);
	return status;
}
