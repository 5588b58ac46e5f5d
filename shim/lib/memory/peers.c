/* Extends peer access between devices to memory that we back. CUDA does that only for its own allocations. */
#define _GNU_SOURCE
#include "lookup.h"
#include "memory.h"

static uint64_t allowed[DEVICES_MAX]; /* the devices that may use this one's memory, by bit; under the lock */
static uint64_t unasked[DEVICES_MAX]; /* those of them for which we saw no request by the program */

static int set_access(const struct block *block, int device, int flags)
{
	struct cuda_access access = {{ON_DEVICE, device}, flags};

	return driver()->cuMemSetAccess(block->address, block->bytes, &access, 1);
}

int peers_admit(struct block *block)
{
	uint64_t missing = allowed[block->device] & ~block->access;
	int status = 0;

	for (int device = 0; device < DEVICES_MAX && !status; device++)
		if (missing >> device & 1) {
			status = set_access(block, device, READ_AND_WRITE);
			if (!status)
				block->access |= (uint64_t)1 << device;
			else if (peers_unasked(device, block->device))
				status = 0;
		}
	return status;
}

bool peers_complete(const struct block *block)
{
	return !(allowed[block->device] & ~block->access);
}

static void allow(int device, int owner)
{
	allowed[owner] |= (uint64_t)1 << device;
	for (size_t i = 0; i < blocks_count(); i++)
		if (block_at(i)->device == owner && !block_at(i)->physical && !block_at(i)->away)
			peers_admit(block_at(i));
}

static void disallow(int device, int owner)
{
	uint64_t bit = (uint64_t)1 << device;

	allowed[owner] &= ~bit;
	for (size_t i = 0; i < blocks_count(); i++) {
		struct block *block = block_at(i);

		if (block->device == owner && !block->physical && !block->away && block->access & bit &&
		    set_access(block, device, 0) == 0)
			block->access &= ~bit;
	}
}

static void change(void (*how)(int, int), int device, int owner)
{
	if (!called_by_program() || !driver() || device == owner || device < 0 || device >= DEVICES_MAX || owner < 0 ||
	    owner >= DEVICES_MAX)
		return;
	memory_enter();
	blocks_lock();
	how(device, owner);
	blocks_unlock();
	memory_leave();
}

/* A library that contains a CUDA runtime, such as NCCL, enables peer access without a call that the shim sees. */
bool peers_meet(int device, int owner)
{
	int can = 0;

	if (!driver() || !driver()->cuDeviceCanAccessPeer || driver()->cuDeviceCanAccessPeer(&can, device, owner) || !can)
		return false;
	blocks_lock(); /* the caller is between memory_enter and memory_leave */
	unasked[owner] |= (uint64_t)1 << device;
	allow(device, owner);
	blocks_unlock();
	return true;
}

bool peers_unasked(int device, int owner)
{
	return unasked[owner] >> device & 1;
}

static int current_device(void)
{
	int device = -1;

	return driver() && driver()->cuCtxGetDevice(&device) == 0 ? device : -1;
}

static int device_of(void *context)
{
	void *current = NULL;
	int device;

	if (!driver() || driver()->cuCtxGetCurrent(&current) || driver()->cuCtxSetCurrent(context))
		return -1;
	device = current_device();
	driver()->cuCtxSetCurrent(current);
	return device;
}

/* In a forked child. */
void peers_forget(void)
{
	for (int i = 0; i < DEVICES_MAX; i++)
		allowed[i] = unasked[i] = 0;
}

#define PEER_CALL(name, file, not_found, how, owner, parameters, arguments)                               \
	SNAPSHIM_EXPORT int name parameters;                                                              \
	int name parameters                                                                               \
	{                                                                                                 \
		int(*real) parameters = REAL_FUNCTION(name, file, parameters);                            \
		int status = real ? PASS_ON(real arguments) : not_found;                                  \
                                                                                                          \
		if (status == 0)                                                                          \
			change(how, current_device(), owner);                                             \
		return status;                                                                            \
	}

PEER_CALL(cudaDeviceEnablePeerAccess, CUDA_RUNTIME, RUNTIME_NOT_FOUND, allow, peer, (int peer, unsigned int flags),
	  (peer, flags))
PEER_CALL(cudaDeviceDisablePeerAccess, CUDA_RUNTIME, RUNTIME_NOT_FOUND, disallow, peer, (int peer), (peer))
PEER_CALL(cuCtxEnablePeerAccess, CUDA_DRIVER, CUDA_NOT_FOUND, allow, device_of(peer), (void *peer, unsigned int flags),
	  (peer, flags))
PEER_CALL(cuCtxDisablePeerAccess, CUDA_DRIVER, CUDA_NOT_FOUND, disallow, device_of(peer), (void *peer), (peer))
