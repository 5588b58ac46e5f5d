/* Makes once, while all memory is still mapped, each kind of call that copying and cleaning up will make.
 *
 * Why: a thread may have been parked inside the driver. Either it was mistaken for one outside, and holds a lock of the
 * driver or waits for one. Or the driver was locked first, because a thread did not leave it. The driver's lock behaves as
 * a readers-writer lock: a thread that waits for it gets its share as soon as it is unlocked, parked or not. Such a share
 * does not delay copies. Calls that need the lock exclusively (to release pinned memory or a stream) wait until the thread
 * is released, which is not possible once its memory is away. The job does not run meanwhile, so a call that is not
 * delayed here is not delayed later. Sizes are those of the real calls, because small ones take other paths through the
 * driver.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>

#include "memory.h"
#include "stripes.h"

static int copy_there_and_back(struct worker *worker, const struct block *block, void *slot, void *stream)
{
	size_t bytes = block->bytes < stripes.slot_bytes ? block->bytes : stripes.slot_bytes;
	int status = CUDA(worker, cuMemcpyHtoDAsync_v2, block->address, slot, bytes, stream);

	if (!status)
		status = CUDA(worker, cuMemcpyDtoHAsync_v2, slot, block->address, bytes, stream);
	if (status)
		driver()->cuStreamSynchronize(stream); /* the block is unmapped next */
	return status ? status : CUDA(worker, cuStreamSynchronize, stream);
}

/* The devices that may use those blocks of this device that OFFLOAD will release. */
static uint64_t access_on(int device)
{
	uint64_t access = (uint64_t)1 << device;

	for (size_t i = 0; i < blocks_count(); i++)
		if (block_at(i)->device == device && block_at(i)->counted)
			access |= block_at(i)->access;
	return access;
}

/* Runs in the current context. If the device has no room even for this, it fails, and the driver moves all the memory. */
static int map_and_copy(struct worker *worker, int device, void *slot, void *stream)
{
	struct cuda_property property = property_on(device);
	struct block block = {.device = device, .access = access_on(device), .away = true};
	size_t grain = 0;
	int left = 0, descriptor, answer,
	    status = CUDA(worker, cuMemGetAllocationGranularity, &grain, &property, MINIMUM_GRANULARITY);

	block.bytes = grain;
	if (!status)
		status = CUDA(worker, cuMemAddressReserve, &block.address, block.bytes, 0, 0, 0);
	if (status)
		return status;
	answer = physical_attach(&block);
	if (answer)
		status = worker_fails(worker, driver_status(answer), "cuMemCreate, cuMemMap or cuMemSetAccess answers",
				      answer);
	if (!status)
		status = copy_there_and_back(worker, &block, slot, stream);
	if (!status && stripes.holds && physical_export(&block, &descriptor) == 0)
		KERNEL(SYS_close, descriptor); /* a refusal is reported later */
	if (!block.away)
		left |= physical_detach(&block);
	left |= CUDA(worker, cuMemAddressFree, block.address, block.bytes);
	return status ? status : left ? EIO : 0;
}

static int in_context(struct worker *worker, int device, void *context, bool maps)
{
	void *slot = NULL, *stream = NULL;
	int left = 0, status = CUDA(worker, cuCtxSetCurrent, context);

	if (!status)
		status = CUDA(worker, cuMemHostAlloc, &slot, stripes.slot_bytes, PORTABLE);
	if (!status)
		status = CUDA(worker, cuStreamCreate, &stream, NON_BLOCKING);
	if (!status && maps)
		status = map_and_copy(worker, device, slot, stream);
	if (stream)
		left |= CUDA(worker, cuStreamDestroy_v2, stream);
	if (slot)
		left |= CUDA(worker, cuMemFreeHost, slot);
	return status ? status : left ? EIO : 0;
}

static bool is_active(int device)
{
	unsigned int flags;
	int active = 0;

	return driver()->cuDevicePrimaryCtxGetState && driver()->cuDevicePrimaryCtxRetain &&
	       driver()->cuDevicePrimaryCtxRelease_v2 && driver()->cuDevicePrimaryCtxGetState(device, &flags, &active) == 0 &&
	       active;
}

int take_lock(struct worker *worker)
{
	void *stream = NULL;
	int status = CUDA(worker, cuStreamCreate, &stream, NON_BLOCKING);

	return status ? status : CUDA(worker, cuStreamDestroy_v2, stream);
}

int rehearse_lock(struct worker *worker)
{
	int status = 0;

	for (int device = 0; device < DEVICES_MAX && !status; device++) {
		void *context = NULL;

		if (!is_active(device))
			continue;
		status = CUDA(worker, cuDevicePrimaryCtxRetain, &context, device);
		if (status)
			return status;
		status = CUDA(worker, cuCtxSetCurrent, context);
		if (!status)
			status = take_lock(worker);
		if (CUDA(worker, cuDevicePrimaryCtxRelease_v2, device) && !status)
			status = EIO;
	}
	return status;
}

/* Also on devices without a block: the driver's checkpoint, which follows, takes the locks of all devices. */
int rehearse(struct worker *worker)
{
	int status = 0;

	if (!driver())
		return 0; /* a process that has not loaded the driver has no device in use */
	for (int device = 0; device < DEVICES_MAX && !status; device++) {
		bool maps = stripes.devices >> device & 1;
		void *context = maps ? stripes.context[device] : NULL;
		bool retained = is_active(device);

		if (retained)
			status = CUDA(worker, cuDevicePrimaryCtxRetain, &context, device);
		if (!status && context)
			status = in_context(worker, device, context, maps);
		if (retained && context && CUDA(worker, cuDevicePrimaryCtxRelease_v2, device) && !status)
			status = EIO;
	}
	return status;
}
