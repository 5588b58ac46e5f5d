/* The resources for copying: contexts, streams, pinned memory, mapped files. READY creates them; they are released when
 * OFFLOAD, FILL or DROP has answered. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "memory.h"
#include "stripes.h"

#define MAP_NS 10000000000 /* huge pages take milliseconds; pages of 4 KiB are mapped at about 10 GB/s */
#define PIECE_BYTES ((uint64_t)64 << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

int enter(struct worker *worker, int device)
{
	return CUDA(worker, cuCtxSetCurrent, stripes.context[device]);
}

/* Our calls do not become part of a capture by the job, and do not invalidate it, whatever its mode. */
void stay_out_of_captures(void)
{
	int mode = RELAXED;

	if (driver()->cuThreadExchangeStreamCaptureMode)
		driver()->cuThreadExchangeStreamCaptureMode(&mode);
}

/* Uses a device's primary context if it has one, else a context in which a block was created. Creates none. */
int enter_devices(struct worker *worker)
{
	const struct driver *cuda = stripes.devices ? driver() : NULL;

	if (cuda)
		stay_out_of_captures();
	for (int device = 0; device < DEVICES_MAX; device++) {
		unsigned int flags;
		int active = 0;

		if (!(stripes.devices >> device & 1) || stripes.entered >> device & 1 || !cuda->cuDevicePrimaryCtxGetState ||
		    !cuda->cuDevicePrimaryCtxRetain || !cuda->cuDevicePrimaryCtxRelease_v2)
			continue;
		if (cuda->cuDevicePrimaryCtxGetState(device, &flags, &active) || !active)
			continue;
		if (CUDA(worker, cuDevicePrimaryCtxRetain, &stripes.context[device], device))
			return EIO;
		stripes.entered |= (uint64_t)1 << device;
	}
	return 0;
}

int leave_devices(struct worker *worker)
{
	int status = 0;

	for (int device = 0; device < DEVICES_MAX; device++)
		if (stripes.entered >> device & 1 && CUDA(worker, cuDevicePrimaryCtxRelease_v2, device))
			status = EIO;
	stripes.entered = 0;
	return status;
}

/* A forked child must not inherit it: it cannot use the driver's memory, which would also be in the child's dump. */
static int make_slot(struct worker *worker, char **slot)
{
	int status = CUDA(worker, cuMemHostAlloc, (void **)slot, stripes.slot_bytes, PORTABLE);

	if (!status)
		madvise(*slot, stripes.slot_bytes, MADV_DONTFORK);
	return status;
}

int prepare(struct worker *worker)
{
	if (stripes.devices)
		stay_out_of_captures();
	for (int device = 0; device < DEVICES_MAX; device++) {
		int status;

		if (!(stripes.devices >> device & 1))
			continue;
		status = enter(worker, device);
		for (int slot = 0; slot < SLOTS && !status; slot++) {
			if (!worker->slot[slot])
				status = make_slot(worker, &worker->slot[slot]);
			if (!status && !worker->stream[device][slot])
				status = CUDA(worker, cuStreamCreate, &worker->stream[device][slot], NON_BLOCKING);
		}
		if (!status)
			status = worker_should_stop();
		if (status)
			return status;
	}
	return 0;
}

/* Called while the job runs. A copy into mapped pages can bypass the cache, and is faster than a write to the file. What
 * cannot be mapped is written to the file. */
int map_stripe(struct worker *worker)
{
	int64_t until_ns = now_ns() + MAP_NS;
	struct stat about;
	long mapped;

	if (fstat(worker->stripe, &about) || !about.st_size)
		return 0;
	/* Reserves and records the address range first, so that a child forked before MADV_DONTFORK can unmap it. */
	mapped = KERNEL(SYS_mmap, NULL, about.st_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mapped < 0 && mapped > -4096)
		return 0;
	worker->mapped = (char *)mapped;
	STORE(&worker->reserved_bytes, (uint64_t)about.st_size);
	if (KERNEL(SYS_mmap, mapped, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, worker->stripe, 0) !=
		    mapped ||
	    KERNEL(SYS_madvise, mapped, about.st_size, MADV_DONTFORK))
		return 0;
	while (worker->mapped_bytes < worker->reserved_bytes && now_ns() < until_ns && !worker_should_stop()) {
		uint64_t left = worker->reserved_bytes - worker->mapped_bytes,
			 piece = left < PIECE_BYTES ? left : PIECE_BYTES;

		if (KERNEL(SYS_madvise, mapped + (long)worker->mapped_bytes, piece, MADV_POPULATE_WRITE))
			break;
		worker->mapped_bytes += piece;
	}
	return 0;
}

static void unmap_stripe(struct worker *worker)
{
	if (worker->reserved_bytes)
		KERNEL(SYS_munmap, worker->mapped, worker->reserved_bytes);
	worker->mapped = NULL;
	worker->mapped_bytes = worker->reserved_bytes = 0;
}

/* Continues after errors of the driver. */
int clean_up(struct worker *worker)
{
	int failures = 0;

	unmap_stripe(worker);
	if (!stripes.devices || stripes.invalid)
		return 0; /* and there may be no driver */
	for (int device = 0; device < DEVICES_MAX; device++)
		for (int slot = 0; slot < SLOTS; slot++)
			if (worker->stream[device][slot]) {
				failures += enter(worker, device) != 0;
				/* Ends all copies from or to the slot. */
				driver()->cuStreamSynchronize(worker->stream[device][slot]);
				failures += CUDA(worker, cuStreamDestroy_v2, worker->stream[device][slot]) != 0;
				worker->stream[device][slot] = NULL;
			}
	for (int slot = 0; slot < SLOTS; slot++)
		if (worker->slot[slot]) {
			/* The next user of this address range may need it in forked children. */
			madvise(worker->slot[slot], stripes.slot_bytes, MADV_DOFORK);
			failures += CUDA(worker, cuMemFreeHost, worker->slot[slot]) != 0;
			worker->slot[slot] = NULL;
		}
	driver()->cuCtxSetCurrent(NULL);
	return failures ? EIO : 0;
}

/* In a forked child, which inherits what was mapped before MADV_DONTFORK. */
void resources_forget(void)
{
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++)
		unmap_stripe(&workers[i]);
}
