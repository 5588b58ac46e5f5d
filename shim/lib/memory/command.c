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
#include "memory.h"
#include "stripes.h"

#define REHEARSAL_NS 1000000000	 /* takes milliseconds, unless a parked thread holds a lock */
#define COME_BACK_NS 2000000000	 /* for a call that waited for a parked thread to return after the release */
#define TAKE_AWAY_NS 60000000000 /* to release all physical memory, which cannot be stopped half-way */
#define CLEAN_UP_NS 30000000000	 /* for the clean-up after a command, whatever its outcome */
#define SLOT_MIN 4096
#define SLOT_MAX (1 << 30)

static bool ready;
static bool contexts_kept; /* a call that has not returned uses one of them */
static struct {
	unsigned int count;
	size_t slot_bytes;
} offloaded_as; /* the stripes that hold the content */

/* Keeps an earlier text, which is nearer to the cause. */
static int refuse(int status, const char *reason)
{
	if (!snapshim_mailbox.text[0])
		add_text(reason);
	return status;
}

/* Describes which call of which worker failed. */
static int explain(int status)
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

/* `status`: the result of the tasks that used them. */
static void let_contexts_go(int status)
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

/* After OFFLOAD or FILL, which also fail if something is left that a dump would contain. */
static int settled(int status, int64_t by_ns)
{
	int left = drop(by_ns);

	return status ? status : left;
}

/* Releases what can be released; only EBUSY is an error. */
static int give_up(void)
{
	int status = drop(now_ns() + CLEAN_UP_NS);

	return status == EBUSY ? EBUSY : 0;
}

static int open_sockets(void)
{
	int theirs = -1, status = give_up();

	if (!status)
		status = handover_open(&theirs);
	if (!status)
		snapshim_mailbox.result[0] = (uint64_t)theirs;
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

static int prepare_all(int64_t until_ns)
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
	if (!status)
		status = workers_run(stripes.count, prepare, until_ns);
	let_contexts_go(status);
	return snapshim_mailbox.text[0] ? status : explain(status);
}

static uint64_t striped_bytes(void)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < blocks_count(); i++)
		bytes += block_at(i)->striped ? block_at(i)->bytes : 0;
	return bytes;
}

static int make_ready(int64_t until_ns)
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
	snapshim_mailbox.device_stripes = (uint32_t)count;
	memset(snapshim_mailbox.device_done, 0, sizeof(snapshim_mailbox.device_done));
	status = handover_receive(stripes.count, until_ns);
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
	if (!status && !offloaded)
		status = explain(workers_run(stripes.count, map_stripe, until_ns));
	if (status)
		give_up();
	snapshim_mailbox.result[0] = offloaded ? striped_bytes() : LOAD(&snapshim_mailbox.device_bytes);
	return status;
}

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

static int offload_memory(int64_t until_ns)
{
	int status;

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
	if (!status)
		status = explain(workers_run(1, drop_freed, until_ns));
	if (!status) {
		mark_striped(true);
		if (!files_suffice()) {
			mark_striped(false);
			return refuse(EFBIG, "there is more device memory than the stripe files have room for");
		}
		status = copy(copy_out, until_ns);
	}
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

static int fill_memory(int64_t until_ns)
{
	int64_t by_ns;
	int status;

	if (!LOAD(&snapshim_mailbox.device_offloaded))
		return refuse(EALREADY, "no memory is offloaded");
	status = prepare_all(until_ns);
	if (!status)
		status = explain(workers_run(stripes.count, attach_all, until_ns));
	if (!status)
		status = copy(copy_in, until_ns);
	by_ns = now_ns() + CLEAN_UP_NS;
	if (!status) {
		mark_striped(false);
		STORE(&snapshim_mailbox.device_offloaded, 0);
	} else if (workers_are_back()) {
		workers_finish(stripes.count, detach_all, by_ns);
	}
	return settled(status, by_ns);
}

int memory_dispatch(uint32_t command, int64_t timeout_ns)
{
	int64_t until_ns = now_ns() + timeout_ns;

	if (ready && !back_by(now_ns() + COME_BACK_NS))
		return refuse(EBUSY, "a call into CUDA of an earlier command has not returned");
	if (command == SNAPSHIM_MEMORY_OPEN)
		return open_sockets();
	if (command == SNAPSHIM_MEMORY_DROP)
		return give_up();
	if (command == SNAPSHIM_MEMORY_READY)
		return make_ready(until_ns);
	if (!ready)
		return refuse(EINVAL, "MEMORY_READY comes first");
	return command == SNAPSHIM_MEMORY_OFFLOAD ? offload_memory(until_ns) : fill_memory(until_ns);
}

/* In a forked child: the memory, the threads and what they copy to are its parent's. */
void memory_forget(void)
{
	handover_close();
	ready = false;
	resources_forget();
	workers_forget();
	peers_forget();
	ipc_forget();
	backing_forget();
	contexts_forget();
	memory_calls_forget();
	blocks_forget();
	snapshim_mailbox.device_offloaded = 0;
	snapshim_mailbox.device_stripes = 0;
	snapshim_mailbox.device_cancel = 0;
	memset(snapshim_mailbox.device_done, 0, sizeof(snapshim_mailbox.device_done));
}
