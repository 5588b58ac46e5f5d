/* Backs large allocations with memory whose physical part can be released and created again at the same address.
 *
 * Invariant: on any failure here the program gets the result of the real function with the same arguments, so that the
 * runtime's last error is what it would have been. What the real function allocated, it frees.
 */
#define _GNU_SOURCE
#include "lookup.h"
#include "memory.h"

#define SMALLEST_BYTES (1 << 20) /* smaller ones the driver packs together; the driver's checkpoint moves them */

static uint64_t used_devices; /* by bit */
static bool apart; /* two of them cannot use each other's memory: nothing is backed any more */
static uint32_t freed_blocks; /* in the table, to be released */

/* NCCL's own memory is not backed: NCCL exports its buffers to other processes, and has none left when a rank moves. */
bool backing_serves(const void *caller)
{
	return called_by_program() && !nccl_contains(caller) && !lookup_is_nccl(caller);
}

/* Whether an allocation of this size is backed. */
bool backing_takes(size_t bytes)
{
	return bytes >= SMALLEST_BYTES;
}

/* A plain copy between two devices (cudaMemcpy with both addresses) needs memory that both can use, or CUDA's own on both
 * sides, which CUDA stages. So each device gets access to the others' memory. Where one cannot have it, all new memory is
 * CUDA's own from then on. */
bool backing_on(int device)
{
	uint64_t bit, others;

	if (device < 0 || device >= DEVICES_MAX)
		return false;
	bit = (uint64_t)1 << device;
	others = __atomic_fetch_or(&used_devices, bit, __ATOMIC_SEQ_CST);
	for (int other = 0; !(others & bit) && other < DEVICES_MAX; other++)
		if (others >> other & 1) {
			bool both = peers_meet(device, other);

			if (!peers_meet(other, device) || !both)
				STORE(&apart, true);
		}
	return !LOAD(&apart);
}

static bool record(const struct block *block)
{
	bool done;

	blocks_lock();
	done = block_add(block);
	/* On the node that a rank has moved to, a device may not reach the others any more. */
	if (done && (peers_admit(block_with(block->address)) || !peers_complete(block_with(block->address)))) {
		block_remove(block_with(block->address));
		done = false;
	}
	blocks_unlock();
	return done;
}

/* In the context that is current. */
static bool allocate(const struct driver *cuda, uint64_t *address, size_t bytes)
{
	struct cuda_property property;
	struct block block = {0};
	size_t grain = 0;

	if (cuda->cuCtxGetCurrent(&block.context) || !block.context || cuda->cuCtxGetDevice(&block.device) ||
	    !backing_on(block.device))
		return false;
	property = property_on(block.device);
	if (cuda->cuMemGetAllocationGranularity(&grain, &property, MINIMUM_GRANULARITY) || !grain || bytes > SIZE_MAX - grain)
		return false;
	block.bytes = (bytes + grain - 1) / grain * grain;
	block.access = (uint64_t)1 << block.device;
	if (cuda->cuMemAddressReserve(&block.address, block.bytes, 0, 0, 0))
		return false;
	if (physical_attach(&block) == 0) {
		if (record(&block)) {
			*address = block.address;
			return true;
		}
		physical_detach(&block);
	}
	cuda->cuMemAddressFree(block.address, block.bytes);
	return false;
}

static void drop_freed(void);

bool backing_allocate(uint64_t *address, size_t bytes)
{
	const struct driver *cuda;
	bool done;

	if (!address || !backing_takes(bytes) || !called_by_program() || !(cuda = driver()))
		return false;
	drop_freed();
	memory_enter();
	done = allocate(cuda, address, bytes);
	memory_leave();
	return done;
}

/* Waits for all launched work that may use the block: in the block's own context, and in the one that frees it if that is
 * another one of the same device. */
static int settle(const struct driver *cuda, const struct block *block)
{
	void *current = NULL;
	int device = -1, status = cuda->cuCtxGetCurrent(&current);

	if (!status && current && cuda->cuCtxGetDevice(&device) == 0 && device == block->device)
		status = cuda->cuCtxSynchronize();
	if (status || current == block->context)
		return status;
	status = cuda->cuCtxSetCurrent(block->context);
	if (!status)
		status = cuda->cuCtxSynchronize();
	cuda->cuCtxSetCurrent(current);
	return status;
}

/* The block is not in the table, so that no other thread frees it; this call is counted, so that no OFFLOAD misses it. */
static bool give_back(const struct driver *cuda, struct block *block)
{
	if (settle(cuda, block) == 0) {
		physical_detach(block);
		if (block->away) {
			ipc_withdraw(block);
			cuda->cuMemAddressFree(block->address, block->bytes);
			return true;
		}
	}
	blocks_lock();
	block_add(block);
	__atomic_add_fetch(&freed_blocks, block->freed, __ATOMIC_RELAXED);
	blocks_unlock();
	return false;
}

/* While the memory is offloaded none of it can be freed, because the stripes contain all of it. */
static bool take(struct block *found, struct block *block)
{
	if (!found || found->physical || found->away)
		return false;
	*block = *found;
	block_remove(found);
	__atomic_sub_fetch(&freed_blocks, block->freed, __ATOMIC_RELAXED);
	return true;
}

static bool is_freed(const struct block *block, const void *argument)
{
	(void)argument;
	return block->freed;
}

/* Releases the blocks that the program freed during a capture. */
static void drop_freed(void)
{
	if (__atomic_load_n(&freed_blocks, __ATOMIC_RELAXED) && !captures_under_way())
		backing_drop(is_freed, NULL);
}

/* Waiting for the device would invalidate the capture. Captured work may not use the block any more, but work that was
 * launched before may. So the block keeps its memory until a later call can wait. */
static void free_later(struct block *block)
{
	block->freed = true;
	block_changed(block);
	__atomic_add_fetch(&freed_blocks, 1, __ATOMIC_RELAXED);
}

/* Need not wait for launched work: locking the driver has done that. */
int backing_drop_freed(struct block *block)
{
	int answer = physical_detach(block);

	if (block->away) {
		ipc_withdraw(block);
		driver()->cuMemAddressFree(block->address, block->bytes);
		block_remove(block);
		__atomic_sub_fetch(&freed_blocks, 1, __ATOMIC_RELAXED);
	}
	return answer;
}

/* In a forked child. */
void backing_forget(void)
{
	freed_blocks = 0;
	used_devices = 0;
	apart = false;
}

bool backing_free(uint64_t address)
{
	struct block block, *found;
	bool done, later = false;

	if (!address || !called_by_program() || !driver())
		return false;
	drop_freed();
	memory_enter();
	blocks_lock();
	found = block_with(address);
	if (found && (found->address != address || found->freed))
		found = NULL;
	if (found && !found->physical && captures_under_way()) {
		free_later(found);
		later = true;
	}
	done = later || take(found, &block);
	blocks_unlock();
	if (done && !later)
		done = give_back(driver(), &block);
	memory_leave();
	return done;
}

/* Releases the blocks of a context that is about to end, as CUDA would release that context's memory. */
void backing_drop(bool (*which)(const struct block *block, const void *argument), const void *argument)
{
	struct block block;

	if (!called_by_program() || !driver())
		return;
	memory_enter();
	blocks_lock();
	for (size_t i = blocks_count(); i-- > 0;)
		if (which(block_at(i), argument) && take(block_at(i), &block)) {
			blocks_unlock();
			give_back(driver(), &block);
			blocks_lock();
			i = i < blocks_count() ? i : blocks_count();
		}
	blocks_unlock();
	memory_leave();
}

bool memory_is_ours(uint64_t address)
{
	bool found;

	memory_enter();
	blocks_lock();
	found = block_with(address) != NULL;
	blocks_unlock();
	memory_leave();
	return found;
}
