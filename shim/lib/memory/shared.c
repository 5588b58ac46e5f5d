/* Marks memory as shared once other code can access it (exported, multicast, retained by address, registered with a network
 * card). Such memory is left to the driver's checkpoint: if it were replaced, only this process would see the new memory. */
#define _GNU_SOURCE
#include "lookup.h"
#include "segments.h"

/* Other code may access the memory from now on. */
static void share_range(uint64_t address, size_t bytes)
{
	blocks_lock();
	for (size_t i = blocks_from(address); i < blocks_count() && block_at(i)->address < address + bytes; i++) {
		block_at(i)->unusual = true;
		if (block_at(i)->physical)
			physical_numbered(block_at(i)->physical)->shared = true;
		block_changed(block_at(i));
	}
	blocks_unlock();
}

int segments_retain(uint64_t *handle, uint64_t address)
{
	int status;

	memory_enter();
	share_range(address, 1);
	status = REAL(RETAIN, (uint64_t *, uint64_t))(handle, address);
	memory_leave();
	return status;
}

int segments_properties(struct cuda_property *property, uint64_t handle)
{
	int status;

	memory_enter();
	status = REAL(PROPERTIES, (struct cuda_property *, uint64_t))(property, segments_translate(handle, false));
	memory_leave();
	return status;
}

uint64_t memory_share(uint64_t handle)
{
	memory_enter();
	handle = segments_translate(handle, true);
	memory_leave();
	return handle;
}

int segments_export(void *into, uint64_t handle, int kind, unsigned long long flags)
{
	int status;

	memory_enter();
	status = REAL(EXPORT, (void *, uint64_t, int, unsigned long long))(into, segments_translate(handle, false), kind,
									   flags);
	if (status == 0) {
		segments_translate(handle, true);
		__atomic_add_fetch(&snapshim_mailbox.ipc_exports, 1, __ATOMIC_RELAXED);
	}
	memory_leave();
	return status;
}

/* The positions of handle and address differ by version, so several are checked: no other argument can equal our handle. */
int segments_bind_memory(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g)
{
	return REAL(BIND_MEMORY, (uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))(
		memory_share(a), memory_share(b), memory_share(c), memory_share(d), e, f, g);
}

int segments_bind_address(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g)
{
	bool third;

	memory_enter();
	blocks_lock();
	third = block_with(c) != NULL;
	blocks_unlock();
	share_range(third ? c : d, third ? d : e);
	memory_leave();
	return REAL(BIND_ADDRESS, (uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))(a, b, c, d, e, f,
													  g);
}

/* A network card writes there from now on. */
int segments_range_handle(void *handle, uint64_t address, size_t bytes, int kind, unsigned long long flags)
{
	int status;

	memory_enter();
	share_range(address, bytes);
	status = REAL(RANGE_HANDLE, (void *, uint64_t, size_t, int, unsigned long long))(handle, address, bytes, kind, flags);
	memory_leave();
	return status;
}

SNAPSHIM_EXPORT int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t bytes, int kind,
						  unsigned long long flags);
int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t bytes, int kind, unsigned long long flags)
{
	int (*call)(void *, uint64_t, size_t, int, unsigned long long) = REAL_FUNCTION(
		cuMemGetHandleForAddressRange, CUDA_DRIVER, (void *, uint64_t, size_t, int, unsigned long long));

	if (!call)
		return CUDA_NOT_FOUND;
	memory_enter();
	share_range(address, bytes);
	memory_leave();
	return PASS_ON(call(handle, address, bytes, kind, flags));
}
