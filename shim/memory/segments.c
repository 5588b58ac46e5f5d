/* Physical memory that a program creates and maps itself, as torch's expandable segments do, can be parked as well.
 *
 * Such programs get the driver's functions from cudaGetDriverEntryPoint; in our place stand those below. A program holds our
 * number for physical memory, so that other memory can take its place. Invariant: any other handle, and any address that was
 * not mapped here, is the driver's. Memory that somebody else may see (exported, multicast, retained by address) is `shared`
 * from then on, and stays with the driver's checkpoint.
 */
#define _GNU_SOURCE
#include <string.h>

#include "lookup.h"
#include "memory.h"

enum {
	CREATE, RELEASE, MAP, UNMAP, SET_ACCESS, RETAIN, PROPERTIES, EXPORT, BIND_MEMORY, BIND_ADDRESS, RANGE_HANDLE, ALLOCATE, FREE, FUNCTIONS
};

static void *real[FUNCTIONS]; /* what the runtime gave for it */

#define REAL(number, types) ((int(*) types)LOAD(&real[number]))

static int create(uint64_t *handle, size_t bytes, const struct cuda_property *property, unsigned long long flags)
{
	uint64_t ours = 0;
	int status;

	memory_enter();
	status = REAL(CREATE, (uint64_t *, size_t, const struct cuda_property *, unsigned long long))(handle, bytes, property,
												      flags);
	if (status == 0 && property->type == PINNED && property->location.type == ON_DEVICE && backing_on(property->location.id)) {
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

/* How many mappings it has, or who knows it, is not what it was: that decides for each of its blocks. */
static void physical_changed(uint32_t number)
{
	for (size_t i = 0; i < blocks_count(); i++)
		if (block_at(i)->physical == number)
			block_changed(block_at(i));
}

/* The driver's handle for one of ours, and all others as they are. Whoever `shares` it keeps it from being parked. */
static uint64_t translate(uint64_t ours, bool shares)
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

static int release_memory(uint64_t handle)
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
		if (!block_add(&block)) /* never to be parked then: nobody will see it unmapped */
			physical->shared = true;
		if (physical->mappings > 1)
			physical_changed(block.physical);
	}
	blocks_unlock();
}

static int map(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags)
{
	int status;

	memory_enter();
	status = REAL(MAP, (uint64_t, size_t, size_t, uint64_t, unsigned long long))(address, bytes, offset,
										     translate(handle, false), flags);
	if (status == 0)
		note_mapping(address, bytes, offset, handle);
	memory_leave();
	return status;
}

/* Before the call: afterwards another thread may have mapped something there already, which is not to go. Our own blocks are
 * none of the program's business. */
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
			block_remove(block_at(i));
			if (--physical_numbered(number)->mappings)
				physical_changed(number);
			physical_drop_unused(number);
		}
	}
}

static int unmap(uint64_t address, size_t bytes)
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

static int set_access(uint64_t address, size_t bytes, const struct cuda_access *access, size_t count)
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

/* Its content is somebody else's as well from now on. */
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

static int retain(uint64_t *handle, uint64_t address)
{
	int status;

	memory_enter();
	share_range(address, 1);
	status = REAL(RETAIN, (uint64_t *, uint64_t))(handle, address);
	memory_leave();
	return status;
}

static int properties(struct cuda_property *property, uint64_t handle)
{
	int status;

	memory_enter();
	status = REAL(PROPERTIES, (struct cuda_property *, uint64_t))(property, translate(handle, false));
	memory_leave();
	return status;
}

uint64_t memory_share(uint64_t handle)
{
	memory_enter();
	handle = translate(handle, true);
	memory_leave();
	return handle;
}

static int export(void *into, uint64_t handle, int kind, unsigned long long flags)
{
	int status;

	memory_enter();
	status = REAL(EXPORT, (void *, uint64_t, int, unsigned long long))(into, translate(handle, false), kind, flags);
	if (status == 0) {
		translate(handle, true);
		__atomic_add_fetch(&snapshim_mailbox.ipc_exports, 1, __ATOMIC_RELAXED);
	}
	memory_leave();
	return status;
}

/* Where the handle and the address are differs by version: none of the other arguments looks like one of ours. */
static int bind_memory(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g)
{
	return REAL(BIND_MEMORY, (uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))(
		memory_share(a), memory_share(b), memory_share(c), memory_share(d), e, f, g);
}

static int bind_address(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g)
{
	bool third;

	memory_enter();
	blocks_lock();
	third = block_with(c) != NULL;
	blocks_unlock();
	share_range(third ? c : d, third ? d : e);
	memory_leave();
	return REAL(BIND_ADDRESS, (uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))(a, b, c, d, e, f, g);
}

/* A network card writes there from now on. */
static int range_handle(void *handle, uint64_t address, size_t bytes, int kind, unsigned long long flags)
{
	int status;

	memory_enter();
	share_range(address, bytes);
	status = REAL(RANGE_HANDLE, (void *, uint64_t, size_t, int, unsigned long long))(handle, address, bytes, kind, flags);
	memory_leave();
	return status;
}

SNAPSHIM_EXPORT int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t bytes, int kind, unsigned long long flags);
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

static int allocate(uint64_t *address, size_t bytes)
{
	return backing_allocate(address, bytes) ? 0 : PASS_ON(REAL(ALLOCATE, (uint64_t *, size_t))(address, bytes));
}

static int free_(uint64_t address)
{
	return backing_free(address) ? 0 : PASS_ON(REAL(FREE, (uint64_t))(address));
}

static const struct {
	const char *name;
	void *function;
} stand_ins[FUNCTIONS] = {
	[CREATE] = {"cuMemCreate", create},
	[RELEASE] = {"cuMemRelease", release_memory},
	[MAP] = {"cuMemMap", map},
	[UNMAP] = {"cuMemUnmap", unmap},
	[SET_ACCESS] = {"cuMemSetAccess", set_access},
	[RETAIN] = {"cuMemRetainAllocationHandle", retain},
	[PROPERTIES] = {"cuMemGetAllocationPropertiesFromHandle", properties},
	[EXPORT] = {"cuMemExportToShareableHandle", export},
	[BIND_MEMORY] = {"cuMulticastBindMem", bind_memory},
	[BIND_ADDRESS] = {"cuMulticastBindAddr", bind_address},
	[RANGE_HANDLE] = {"cuMemGetHandleForAddressRange", range_handle},
	[ALLOCATE] = {"cuMemAlloc", allocate},
	[FREE] = {"cuMemFree", free_},
};

void *segments_stand_in(const char *name, void *function)
{
	for (int i = 0; i < FUNCTIONS; i++)
		if (strcmp(name, stand_ins[i].name) == 0) {
			STORE(&real[i], function);
			return stand_ins[i].function;
		}
	return function;
}

/* Older runtimes have no `found`: then it is some register's value, and passed on as such. */
#define ENTRY_POINT(name, parameters, arguments)                                                        \
	SNAPSHIM_EXPORT int name parameters;                                                            \
	int name parameters                                                                             \
	{                                                                                               \
		int(*call) parameters = REAL_FUNCTION(name, CUDA_RUNTIME, parameters);                  \
		int status = call ? call arguments : RUNTIME_NOT_FOUND;                                 \
                                                                                                        \
		if (status == 0 && symbol && function && *function && driver() &&                      \
		    backing_serves(__builtin_return_address(0)))                                        \
			*function = segments_stand_in(symbol, *function);                               \
		return status;                                                                          \
	}

ENTRY_POINT(cudaGetDriverEntryPoint, (const char *symbol, void **function, unsigned long long flags, void *found),
	    (symbol, function, flags, found))
ENTRY_POINT(cudaGetDriverEntryPoint_ptsz, (const char *symbol, void **function, unsigned long long flags, void *found),
	    (symbol, function, flags, found))
ENTRY_POINT(cudaGetDriverEntryPointByVersion,
	    (const char *symbol, void **function, unsigned int version, unsigned long long flags, void *found),
	    (symbol, function, version, flags, found))
ENTRY_POINT(cudaGetDriverEntryPointByVersion_ptsz,
	    (const char *symbol, void **function, unsigned int version, unsigned long long flags, void *found),
	    (symbol, function, version, flags, found))
