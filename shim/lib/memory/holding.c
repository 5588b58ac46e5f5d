/* Hands the blocks' physical memory over to the daemon as descriptors, and takes it back: no content is copied.
 *
 * A descriptor keeps the memory on its device when this process has released it, and when every process that has it mapped is
 * dead. Invariant: memory is released here only when the daemon has confirmed that all descriptors are kept. They are closed here at
 * once, in small batches: a job may have more blocks than it may open files.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>

#include "handover.h"
#include "ipc_server.h"
#include "memory.h"
#include "stripes.h"

#define AGAIN_US 200 /* the daemon has not taken, or not sent, the next ones yet */

static void close_all(const int *descriptors, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++)
		KERNEL(SYS_close, descriptors[i]);
}

/* Copies a block into memory that this process creates, at another address. */
static int duplicate(struct worker *worker, const struct block *block, uint64_t address, uint64_t handle)
{
	struct cuda_access access = {{ON_DEVICE, block->device}, READ_AND_WRITE};
	void *stream = NULL;
	int left, status = CUDA(worker, cuMemMap, address, block->bytes, 0, handle, 0);

	if (status)
		return status;
	status = CUDA(worker, cuMemSetAccess, address, block->bytes, &access, 1);
	if (!status)
		status = CUDA(worker, cuStreamCreate, &stream, NON_BLOCKING);
	if (!status)
		status = CUDA(worker, cuMemcpyDtoDAsync_v2, address, block->address, block->bytes, stream);
	if (stream) {
		left = CUDA(worker, cuStreamSynchronize, stream);
		status = status ? status : left;
		left = CUDA(worker, cuStreamDestroy_v2, stream);
		status = status ? status : left;
	}
	left = CUDA(worker, cuMemUnmap, address, block->bytes);
	return status ? status : left;
}

/* Whether imported memory is being replaced. The job may be released after a time-out: what was copied until then is old, and
 * must not replace anything. */
enum { IDLE, COPYING, SWAPPING, ABANDONED };
static uint32_t replacing;

bool memory_lets_run(void)
{
	uint32_t copying = COPYING;

	(void)SWAP_IF(&replacing, &copying, ABANDONED);
	if (LOAD(&replacing) == SWAPPING)
		return false;
	ipc_server_open_to_others();
	return true;
}

/* Takes the handle over, whose memory has the block's content. */
static int swap(struct worker *worker, struct block *block, uint64_t handle)
{
	uint32_t copying = COPYING;
	int answer, status = worker_should_stop();

	if (!status && !SWAP_IF(&replacing, &copying, SWAPPING))
		status = ECANCELED;
	if (status) {
		driver()->cuMemRelease(handle);
		return status;
	}
	answer = physical_replace(block, handle);
	if (!answer || block->away)
		ipc_offer(block, -1); /* what other processes would get is not the block's memory any more */
	if (block->away) { /* the job must not run without it */
		block->striped = true;
		STORE(&snapshim_mailbox.device_offloaded, 1);
	}
	STORE(&replacing, COPYING);
	return answer ? worker_fails(worker, EIO, "cuMemUnmap, cuMemMap or cuMemSetAccess answers", answer) : 0;
}

/* Needs room on the device for one block more. If it fails, the block has the memory that it had. */
static int make_own(struct worker *worker, struct block *block)
{
	uint64_t address, handle;
	int answer, status = enter(worker, block->device);

	if (!status && !driver()->cuMemcpyDtoDAsync_v2)
		status = worker_fails(worker, ENOSYS, "the driver lacks cuMemcpyDtoDAsync", 0);
	if (!status)
		status = CUDA(worker, cuMemAddressReserve, &address, block->bytes, 0, 0, 0);
	if (status)
		return status;
	answer = physical_create(block, &handle);
	if (answer)
		status = worker_fails(worker, driver_status(answer), "cuMemCreate answers", answer);
	if (!status) {
		status = duplicate(worker, block, address, handle);
		if (status)
			driver()->cuMemRelease(handle);
		else
			status = swap(worker, block, handle);
	}
	driver()->cuMemAddressFree(address, block->bytes);
	return status;
}

int own_all(struct worker *worker)
{
	int status = 0;

	STORE(&replacing, COPYING);
	for (size_t i = 0; i < blocks_count() && !status; i++)
		if (block_at(i)->imported) {
			status = make_own(worker, block_at(i));
			if (!status)
				status = worker_should_stop();
		}
	STORE(&replacing, IDLE);
	return status;
}

void holding_forget(void)
{
	replacing = IDLE;
}

static int pass_on(struct worker *worker, const struct snapshim_held_block *records, const int *descriptors,
		   unsigned int count)
{
	for (;;) {
		int status = handover_send(records, count ? count * sizeof(*records) : sizeof(*records), descriptors, count);

		if (status != EAGAIN)
			return status ? worker_fails(worker, status, "sendmsg fails with errno", status) : 0;
		status = worker_should_stop();
		if (status)
			return status;
		pause_us(AGAIN_US);
	}
}

/* Until the daemon says that it keeps all descriptors. Before that, they may be lost with it. */
static int await_answer(struct worker *worker)
{
	for (;;) {
		int status = handover_answer();

		if (status != EAGAIN)
			return status ? worker_fails(worker, status, "the daemon does not confirm the descriptors: errno",
						     status) :
					0;
		status = worker_should_stop();
		if (status)
			return status;
		pause_us(AGAIN_US);
	}
}

int hand_over(struct worker *worker)
{
	struct snapshim_held_block record[SNAPSHIM_STRIPES_MAX];
	int descriptor[SNAPSHIM_STRIPES_MAX], status = 0, answer;
	unsigned int count = 0;

	for (size_t i = 0; i < blocks_count() && !status; i++) {
		const struct block *block = block_at(i);

		if (!block->striped)
			continue;
		status = enter(worker, block->device);
		answer = status ? 0 : physical_export(block, &descriptor[count]);
		if (answer)
			status = worker_fails(worker, EXDEV, "cuMemExportToShareableHandle answers", answer);
		if (status)
			break;
		record[count++] = (struct snapshim_held_block){block->address, block->bytes, block->device, 0};
		if (count == SNAPSHIM_STRIPES_MAX) {
			status = pass_on(worker, record, descriptor, count);
			close_all(descriptor, count);
			count = 0;
		}
		if (!status)
			status = worker_should_stop();
	}
	if (!status && count)
		status = pass_on(worker, record, descriptor, count);
	close_all(descriptor, count);
	record[0] = (struct snapshim_held_block){0};
	if (!status)
		status = pass_on(worker, record, descriptor, 0);
	return status ? status : await_answer(worker);
}

static uint64_t away_blocks(void)
{
	uint64_t count = 0;

	for (size_t i = 0; i < blocks_count(); i++)
		count += block_at(i)->striped && block_at(i)->away;
	return count;
}

/* Other processes get the memory by the descriptor that it came with, because imported memory cannot be exported. */
static int offer(struct worker *worker, const struct block *block, int descriptor)
{
	long copy = KERNEL(SYS_fcntl, descriptor, F_DUPFD_CLOEXEC, 0);

	if (copy < 0)
		return worker_fails(worker, (int)-copy, "fcntl fails with errno", -copy);
	ipc_offer(block, (int)copy);
	return 0;
}

/* Maps memory where the record says. */
static int map_one(struct worker *worker, const struct snapshim_held_block *record, int descriptor)
{
	struct block *block = block_with(record->address);
	int answer, status;

	if (!block || !block->striped || !block->away || block->address != record->address || block->bytes != record->bytes)
		return worker_fails(worker, EINVAL, "a descriptor came for an address that lacks no memory of that size:",
				    (long)record->address);
	status = enter(worker, block->device);
	answer = status ? 0 : physical_import(block, descriptor);
	if (answer)
		status = worker_fails(worker, driver_status(answer),
				      "cuMemImportFromShareableHandle, cuMemMap or cuMemSetAccess answers", answer);
	if (!status && block->exported)
		status = offer(worker, block, descriptor);
	return status;
}

/* All striped blocks are away before. */
int take_back(struct worker *worker)
{
	struct snapshim_held_block record[SNAPSHIM_STRIPES_MAX];
	int descriptor[SNAPSHIM_STRIPES_MAX], status = 0;
	uint64_t left = away_blocks();
	unsigned int count;

	if (left != snapshim_mailbox.argument[1])
		return worker_fails(worker, EINVAL,
				    "another number of descriptors was announced than the memory has blocks:", (long)left);
	while (!status && left) {
		status = handover_take(record, descriptor, &count);
		if (status == EAGAIN) {
			status = worker_should_stop();
			pause_us(AGAIN_US);
			continue;
		}
		if (status)
			return worker_fails(worker, status, "recvmsg fails with errno", status);
		for (unsigned int i = 0; i < count && !status; i++) {
			status = map_one(worker, &record[i], descriptor[i]);
			left--;
		}
		close_all(descriptor, count);
		if (!status)
			status = worker_should_stop();
	}
	return status;
}
