/* Tracks physical memory that a program creates and maps itself, as torch's expandable segments do, so that it can be
 * offloaded.
 *
 * Such programs get driver functions from cudaGetDriverEntryPoint, which returns those below instead (entry.c). A program
 * holds our handle for physical memory, so that the memory behind it can be replaced. Invariant: any other handle, and any
 * address that was not mapped here, is the driver's.
 */
#define _GNU_SOURCE
#include "segments.h"

void *segments_real[FUNCTIONS];

int segments_create(uint64_t *handle, size_t bytes, const struct cuda_property *property, unsigned long long flags)
{
	uint64_t ours = 0;
	int status;

	memory_enter();
	status = REAL(CREATE, (uint64_t *, size_t, const struct cuda_property *, unsigned long long))(handle, bytes, property,
												      flags);
	if (status == 0 && property->type == PINNED && property->location.type == ON_DEVICE &&
	    backing_on(property->location.id)) {
		blocks_lock();
		ours = physical_add(&(struct physical){
			.handle = *handle, .bytes = bytes, .flags = flags, .property = *property, .held = true});
		blocks_unlock();
	}
	memory_leave();
	if (ours)
		*handle = ours;
	return status;
}

/* Its number of mappings, or whether it is shared, has changed, which decides whether its blocks can be offloaded. */
static void physical_changed(uint32_t number)
{
	for (size_t i = 0; i < blocks_count(); i++)
		if (block_at(i)->physical == number)
			block_changed(block_at(i));
}

uint64_t segments_translate(uint64_t ours, bool shares)
{
	struct physical *physical;
	uint64_t handle = ours;

	blocks_lock();
	physical = physical_of(ours);
	if (physical) {
		physical->shared |= shares;
		handle = physical->handle;
		if (shares)
			physical_changed(physical_number(ours));
	}
	blocks_unlock();
	return handle;
}

int segments_release(uint64_t handle)
{
	struct physical *physical;
	uint64_t theirs = handle;
	int status;

	memory_enter();
	blocks_lock();
	physical = physical_of(handle);
	if (physical) {
		theirs = physical->handle;
		physical->held = false;
		physical_drop_unused(physical_number(handle));
	}
	blocks_unlock();
	status = REAL(RELEASE, (uint64_t))(theirs);
	memory_leave();
	return status;
}

static void note_mapping(uint64_t address, size_t bytes, size_t offset, uint64_t handle)
{
	struct block block = {.address = address, .bytes = bytes};
	struct physical *physical;

	blocks_lock();
	physical = physical_of(handle);
	if (physical) {
		physical->mappings++;
		block.physical = physical_number(handle);
		block.device = physical->property.location.id;
		block.unusual = offset != 0 || block.device < 0 || block.device >= DEVICES_MAX;
		driver()->cuCtxGetCurrent(&block.context);
		if (!block_add(&block)) /* then it is never offloaded, because its unmapping would not be noticed */
			physical->shared = true;
		if (physical->mappings > 1)
			physical_changed(block.physical);
	}
	blocks_unlock();
}

int segments_map(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags)
{
	int status;

	memory_enter();
	status = REAL(MAP, (uint64_t, size_t, size_t, uint64_t, unsigned long long))(
		address, bytes, offset, segments_translate(handle, false), flags);
	if (status == 0)
		note_mapping(address, bytes, offset, handle);
	memory_leave();
	return status;
}

/* Called before unmapping: afterwards another thread may have mapped other memory there, which must stay. Blocks that we
 * allocated are not affected. */
static void mark_leaving(uint64_t address, size_t bytes)
{
	for (size_t i = blocks_from(address); i < blocks_count() && block_at(i)->address < address + bytes; i++)
		if (block_at(i)->physical && !block_at(i)->leaving)
			block_at(i)->leaving = self_tid();
}

static void settle_leaving(uint64_t address, size_t bytes, bool gone)
{
	for (size_t i = blocks_from(address); i < blocks_count() && block_at(i)->address < address + bytes;) {
		uint32_t number = block_at(i)->physical;

		if (block_at(i)->leaving != self_tid()) {
			i++;
		} else if (!gone) {
			block_at(i++)->leaving = 0;
		} else {
			block_is_imported(block_at(i), false);
			block_remove(block_at(i));
			if (--physical_numbered(number)->mappings)
				physical_changed(number);
			physical_drop_unused(number);
		}
	}
}

int segments_unmap(uint64_t address, size_t bytes)
{
	int status;

	memory_enter();
	blocks_lock();
	mark_leaving(address, bytes);
	blocks_unlock();
	status = REAL(UNMAP, (uint64_t, size_t))(address, bytes);
	blocks_lock();
	settle_leaving(address, bytes, status == 0);
	blocks_unlock();
	memory_leave();
	return status;
}

static void note_access(uint64_t address, size_t bytes, const struct cuda_access *access)
{
	bool device = access->location.type == ON_DEVICE && access->location.id >= 0 && access->location.id < DEVICES_MAX;
	uint64_t bit = device ? (uint64_t)1 << access->location.id : 0;

	for (size_t i = blocks_from(address); i < blocks_count() && block_at(i)->address < address + bytes; i++) {
		struct block *block = block_at(i);
		bool whole = block->address >= address && block->address + block->bytes <= address + bytes;

		block->access &= ~bit;
		if (access->flags == READ_AND_WRITE)
			block->access |= bit;
		block->unusual |= !device || !whole || (access->flags && access->flags != READ_AND_WRITE);
		block_changed(block);
	}
}

int segments_set_access(uint64_t address, size_t bytes, const struct cuda_access *access, size_t count)
{
	int status;

	memory_enter();
	status = REAL(SET_ACCESS, (uint64_t, size_t, const struct cuda_access *, size_t))(address, bytes, access, count);
	if (status == 0) {
		blocks_lock();
		for (size_t i = 0; i < count; i++)
			note_access(address, bytes, &access[i]);
		blocks_unlock();
	}
	memory_leave();
	return status;
}
