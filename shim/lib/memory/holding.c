/* Hands the blocks' physical memory over to the daemon as descriptors, and takes it back: no content is copied.
 *
 * A descriptor keeps the memory on its device when this process has released it, and when every process that has it mapped is
 * dead. Invariant: memory is released here only when the daemon has been sent all descriptors. They are closed here at once, in
 * small batches: a job may have more blocks than it may open files.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>

#include "handover.h"
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
		answer = status ? 0 : physical_detach(block);
		if (answer && !block->away)
			status = worker_fails(worker, EIO, "cuMemUnmap answers", answer);
		if (status)
			driver()->cuMemRelease(handle);
		answer = status ? 0 : physical_map(block, handle);
		if (answer)
			status = worker_fails(worker, EIO, "cuMemMap or cuMemSetAccess answers", answer);
	}
	driver()->cuMemAddressFree(address, block->bytes);
	return status;
}

int own_all(struct worker *worker)
{
	int status = 0;

	for (size_t i = 0; i < blocks_count() && !status; i++)
		if (block_at(i)->imported) {
			status = make_own(worker, block_at(i));
			if (!status)
				status = worker_should_stop();
		}
	return status;
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
	return status ? status : pass_on(worker, record, descriptor, 0);
}

/* The next block that has no memory; NULL: all have. */
static struct block *next_away(size_t *from)
{
	for (; *from < blocks_count(); (*from)++)
		if (block_at(*from)->striped && block_at(*from)->away)
			return block_at(*from);
	return NULL;
}

/* The descriptors come in the order in which they were handed over, which is that of the blocks. */
int take_back(struct worker *worker)
{
	int descriptor[SNAPSHIM_STRIPES_MAX], status = 0;
	unsigned int count;
	size_t at = 0;

	while (!status && next_away(&at)) {
		status = handover_take(descriptor, &count);
		if (status == EAGAIN) {
			status = worker_should_stop();
			pause_us(AGAIN_US);
			continue;
		}
		if (status)
			return worker_fails(worker, status, "recvmsg fails with errno", status);
		for (unsigned int i = 0; i < count && !status; i++) {
			struct block *block = next_away(&at);
			int answer = 0;

			status =
				block ? enter(worker, block->device) :
					worker_fails(worker, EINVAL, "more descriptors came than there are blocks:", (long)i);
			if (!status)
				answer = physical_import(block, descriptor[i]);
			if (answer)
				status = worker_fails(worker, driver_status(answer),
						      "cuMemImportFromShareableHandle, cuMemMap or cuMemSetAccess answers",
						      answer);
		}
		close_all(descriptor, count);
		if (!status)
			status = worker_should_stop();
	}
	return status;
}
