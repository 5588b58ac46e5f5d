/* Makes every kind of call once that copying and clearing up will make, while all memory is still where it was.
 *
 * Why: calls that only ask (an event, a pointer) pass the driver's lock, so a thread may have been parked in the middle of one,
 * with a lock of the driver's. What waits for that lock waits until the thread is let go, which cannot be once its memory is
 * away. Nothing of the job runs meanwhile: who is held up by nobody here is held up by nobody later. Sizes are those of the real
 * calls: small ones take other ways through the driver.
 */
#define _GNU_SOURCE
#include <errno.h>

#include "memory.h"
#include "stripes.h"

/* For want of device memory nothing can be mapped: then that call is not made later either. */
static int mapped(struct worker *worker, struct block *block)
{
	int answer = physical_attach(block);

	if (!answer || answer == CUDA_OUT_OF_MEMORY)
		return 0;
	return worker_fails(worker, driver_status(answer), "cuMemCreate, cuMemMap or cuMemSetAccess answers", answer);
}

static int copy_there_and_back(struct worker *worker, const struct block *block, void *slot, void *stream)
{
	size_t bytes = block->bytes < stripes.slot_bytes ? block->bytes : stripes.slot_bytes;
	int status = CUDA(worker, cuMemcpyHtoDAsync_v2, block->address, slot, bytes, stream);

	if (!status)
		status = CUDA(worker, cuMemcpyDtoHAsync_v2, slot, block->address, bytes, stream);
	return status ? status : CUDA(worker, cuStreamSynchronize, stream);
}

static int on_device(struct worker *worker, int device)
{
	struct cuda_property property = property_on(device);
	struct block block = {.device = device, .access = (uint64_t)1 << device, .away = true};
	void *slot = NULL, *stream = NULL;
	size_t grain = 0;
	int status = enter(worker, device), left = 0;

	if (!status)
		status = CUDA(worker, cuMemGetAllocationGranularity, &grain, &property, MINIMUM_GRANULARITY);
	block.bytes = grain;
	if (!status)
		status = CUDA(worker, cuMemAddressReserve, &block.address, block.bytes, 0, 0, 0);
	if (!status)
		status = mapped(worker, &block);
	if (!status)
		status = CUDA(worker, cuMemHostAlloc, &slot, stripes.slot_bytes, PORTABLE);
	if (!status)
		status = CUDA(worker, cuStreamCreate, &stream, NON_BLOCKING);
	if (!status && !block.away)
		status = copy_there_and_back(worker, &block, slot, stream);
	if (stream)
		left |= CUDA(worker, cuStreamDestroy_v2, stream);
	if (slot)
		left |= CUDA(worker, cuMemFreeHost, slot);
	if (block.address && !block.away)
		left |= physical_detach(&block);
	if (block.address)
		left |= CUDA(worker, cuMemAddressFree, block.address, block.bytes);
	return status ? status : left ? EIO : 0;
}

int rehearse(struct worker *worker)
{
	int status = 0;

	for (int device = 0; device < DEVICES_MAX && !status; device++)
		if (stripes.devices >> device & 1)
			status = on_device(worker, device);
	return status;
}
