/* What MEMORY_READY creates and MEMORY_DROP releases: files, threads, contexts, streams and staging buffers for copying.
 *
 * Invariant: a call into CUDA that has not returned keeps what it uses; the next command waits for it, or answers EBUSY.
 * Nothing here takes a lock of libc, because the job may be parked.
 */
#define _GNU_SOURCE
#include "readiness.h"

#include <errno.h>
#include <string.h>

#include "handover.h"
#include "stripes.h"

#define COME_BACK_NS 2000000000 /* for a call that waited for a parked thread to return after the release */
#define SLOT_MIN 4096
#define SLOT_MAX (1 << 30)

struct offloaded_as offloaded_as;
static bool ready;
static bool contexts_kept; /* a call that has not returned uses one of them */

int refuse(int status, const char *reason)
{
	if (!snapshim_mailbox.text[0])
		add_text(reason);
	return status;
}

int explain(int status)
{
	if (status == EINPROGRESS) {
		add_text("a call into CUDA did not return in time");
		return ETIMEDOUT;
	}
	for (unsigned int i = 0; i < stripes.count && status; i++)
		if (workers[i].status == status && workers[i].call) {
			add_text("stripe ");
			add_number((long)i);
			add_text(": ");
			add_text(workers[i].call);
			add_text(" ");
			add_number(workers[i].answer);
			break;
		}
	if (status == ECANCELED && !snapshim_mailbox.text[0])
		add_text("cancelled");
	if (status == ETIMEDOUT && !snapshim_mailbox.text[0])
		add_text("the deadline passed before the copy was done");
	return status;
}

void let_contexts_go(int status)
{
	contexts_kept = status == EINPROGRESS;
	if (!contexts_kept)
		contexts_let_go();
}

/* Waits until all calls of earlier commands have returned. */
static bool back_by(int64_t until_ns)
{
	if (!workers_come_back(until_ns))
		return false;
	if (contexts_kept)
		let_contexts_go(0);
	return true;
}

/* EBUSY: nothing could be released. Any other error: something may not have been released. */
static int drop(int64_t by_ns)
{
	int status, left;

	if (!ready) {
		handover_close();
		return 0;
	}
	if (!back_by(now_ns()))
		return refuse(EBUSY, "a call into CUDA of an earlier command has not returned");
	if (!contexts_hold(by_ns))
		return refuse(EBUSY, "a thread of the job is ending a CUDA context");
	status = workers_finish(stripes.count, clean_up, by_ns);
	left = status == EINPROGRESS ? status : workers_finish(1, leave_devices, by_ns);
	let_contexts_go(left);
	if (left == EINPROGRESS)
		return refuse(EBUSY, "a call into CUDA that releases memory or streams has not returned");
	handover_close();
	ready = false;
	status = status ? status : left;
	return status && !snapshim_mailbox.text[0] ? explain(status) : status;
}

int settled(int status, int64_t by_ns)
{
	int left = drop(by_ns);

	return status ? status : left;
}

int give_up(void)
{
	int status = drop(now_ns() + CLEAN_UP_NS);

	return status == EBUSY ? EBUSY : 0;
}

int open_sockets(void)
{
	uint64_t inode = 0;
	int theirs = -1, status = give_up();

	if (!status)
		status = handover_open(&theirs, &inode);
	if (!status) {
		snapshim_mailbox.result[0] = (uint64_t)theirs;
		snapshim_mailbox.result[1] = inode;
	}
	return status;
}

/* Finds the devices whose memory is to be copied, and a context for each. */
static int note_devices(int64_t until_ns)
{
	if (!blocks_lock_until(until_ns))
		return refuse(EAGAIN, "a thread is in the middle of allocating or freeing device memory");
	for (size_t i = 0; i < blocks_count(); i++) {
		const struct block *block = block_at(i);

		if (!block->counted && !block->striped && !block->freed)
			continue;
		stripes.devices |= (uint64_t)1 << block->device;
		if (!(stripes.entered >> block->device & 1))
			stripes.context[block->device] = block->context;
	}
	blocks_unlock();
	return 0;
}

int prepare_all(int64_t until_ns)
{
	int status;

	if (!contexts_hold(until_ns))
		return refuse(EAGAIN, "a thread of the job is ending a CUDA context");
	status = stripes.invalid ?
			 refuse(EINVAL,
				"the job has ended a context of CUDA's since MEMORY_READY, which has to be asked again") :
			 note_devices(until_ns);
	if (!status)
		status = workers_run(1, enter_devices, until_ns);
	if (!status && !stripes.holds)
		status = workers_run(stripes.count, prepare, until_ns);
	let_contexts_go(status);
	return snapshim_mailbox.text[0] ? status : explain(status);
}

uint64_t striped_bytes(void)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < blocks_count(); i++)
		bytes += block_at(i)->striped ? block_at(i)->bytes : 0;
	return bytes;
}

/* The job runs: what it allocates later is found out by HAND_OVER. */
static int all_are_exportable(int64_t until_ns)
{
	int status = 0;

	if (!blocks_lock_until(until_ns))
		return refuse(EAGAIN, "a thread is in the middle of allocating or freeing device memory");
	for (size_t i = 0; i < blocks_count() && !status; i++)
		if (block_at(i)->counted && !physical_is_exportable(block_at(i)))
			status = refuse(EXDEV, "the program has created memory that cannot be exported");
	blocks_unlock();
	return status;
}

int make_ready(int64_t until_ns)
{
	uint64_t count = snapshim_mailbox.argument[1], slot_bytes = snapshim_mailbox.argument[2];
	bool offloaded = LOAD(&snapshim_mailbox.device_offloaded);
	int status;

	if (!handover_is_open())
		return refuse(EINVAL, "MEMORY_OPEN comes before MEMORY_READY");
	if (count < 1 || count > SNAPSHIM_STRIPES_MAX || slot_bytes < SLOT_MIN || slot_bytes > SLOT_MAX ||
	    slot_bytes % SLOT_MIN)
		return refuse(EINVAL, "1 to 16 stripes, slots of 4 KiB to 1 GiB");
	if (offloaded && (count != offloaded_as.count || slot_bytes != offloaded_as.slot_bytes)) {
		add_text("the memory was offloaded with other numbers of stripes and bytes of a slot: ");
		add_number((long)offloaded_as.count);
		add_text(" and ");
		add_number((long)offloaded_as.slot_bytes);
		return EINVAL;
	}
	if (!contexts_hold(until_ns))
		return refuse(EAGAIN, "a thread of the job is ending a CUDA context");
	memset(&stripes, 0, sizeof(stripes));
	contexts_let_go();
	stripes.count = (unsigned int)count;
	stripes.slot_bytes = slot_bytes;
	stripes.holds = snapshim_mailbox.argument[3] == 1;
	snapshim_mailbox.device_stripes = (uint32_t)count;
	memset(snapshim_mailbox.device_done, 0, sizeof(snapshim_mailbox.device_done));
	if (stripes.holds)
		handover_is_taken();
	status = stripes.holds ? 0 : handover_receive(stripes.count, until_ns);
	if (status)
		return status;
	for (unsigned int i = 0; i < stripes.count; i++) {
		workers[i].number = i;
		workers[i].stripe = handover_file(i);
	}
	status = workers_start(stripes.count);
	if (status) {
		handover_close();
		return refuse(
			status,
			"no thread of ours can be started in this process now: a limit of processes (ulimit -u, pids.max) "
			"is reached, or the driver has too many threads");
	}
	ready = true;
	status = prepare_all(until_ns);
	if (!status && !offloaded && !stripes.holds)
		status = explain(workers_run(stripes.count, map_stripe, until_ns));
	if (!status && !offloaded && stripes.holds)
		status = all_are_exportable(until_ns);
	if (status)
		give_up();
	snapshim_mailbox.result[0] = offloaded ? striped_bytes() : LOAD(&snapshim_mailbox.device_bytes);
	return status;
}

bool is_ready(void)
{
	return ready;
}

bool is_ready_to_hold(void)
{
	return ready && stripes.holds;
}

bool earlier_calls_are_back(void)
{
	return back_by(now_ns() + COME_BACK_NS);
}

void readiness_forget(void)
{
	handover_close();
	ready = false;
}
