/* Creates and releases the physical memory of a block at its address. */
#define _GNU_SOURCE
#include "memory.h"

#include "core/shim.h"

static bool descriptors_refused; /* by a driver that can create memory without them */

static bool is_refusal(int status)
{
	return status == CUDA_INVALID_VALUE || status == CUDA_NOT_PERMITTED || status == CUDA_NOT_SUPPORTED;
}

struct cuda_property property_on(int device)
{
	struct cuda_property property = {.type = PINNED, .location = {ON_DEVICE, device}};
	int supported = 0;

	/* Like cudaMalloc's memory, it can be shared with other processes (ipc_export.c) and registered with network cards,
	 * also by NCCL. */
	if (!LOAD(&descriptors_refused) && driver()->cuDeviceGetAttribute(&supported, DESCRIPTORS_SUPPORTED, device) == 0 &&
	    supported)
		property.handle_types = POSIX_DESCRIPTOR;
	supported = 0;
	if (driver()->cuDeviceGetAttribute(&supported, RDMA_SUPPORTED, device) == 0 && supported)
		property.rdma = 1;
	return property;
}

static int allow(const struct block *block)
{
	int status = 0;

	for (int device = 0; device < DEVICES_MAX && !status; device++)
		if (block->access >> device & 1) {
			struct cuda_access access = {{ON_DEVICE, device}, READ_AND_WRITE};

			status = driver()->cuMemSetAccess(block->address, block->bytes, &access, 1);
			if (status && peers_unasked(device, block->device))
				status = 0; /* the GPUs of another node may not reach each other */
		}
	return status;
}

static int create(uint64_t *handle, const struct block *block, struct physical *created)
{
	struct cuda_property property = created ? created->property : property_on(block->device);
	int status = driver()->cuMemCreate(handle, block->bytes, &property, created ? created->flags : 0);

	if (is_refusal(status) && !created && property.handle_types) {
		property.handle_types = 0;
		status = driver()->cuMemCreate(handle, block->bytes, &property, 0);
		if (!status)
			STORE(&descriptors_refused, true);
	}
	return status;
}

static int place(const struct block *block, uint64_t handle)
{
	int status = driver()->cuMemMap(block->address, block->bytes, 0, handle, 0);

	if (!status) {
		status = allow(block);
		if (status)
			driver()->cuMemUnmap(block->address, block->bytes);
	}
	return status;
}

/* The block has this memory now. */
static void settle(struct block *block, struct physical *created, uint64_t handle)
{
	block->away = false;
	if (!created)
		block->handle = handle;
	else if (created->held)
		created->handle = handle;
	else
		driver()->cuMemRelease(handle); /* the mapping alone keeps it, as before */
}

/* Takes the handle over, also on failure. */
static int map(struct block *block, struct physical *created, uint64_t handle)
{
	int status = place(block, handle);

	if (status)
		driver()->cuMemRelease(handle);
	else
		settle(block, created, handle);
	return status;
}

int physical_attach(struct block *block)
{
	struct physical *created = block->physical ? physical_numbered(block->physical) : NULL;
	uint64_t handle;
	int status = create(&handle, block, created);

	return status ? status : map(block, created, handle);
}

/* The program may have created memory that cannot be shared, or released the handle: then the mapping alone keeps it. */
bool physical_is_exportable(const struct block *block)
{
	const struct physical *created = block->physical ? physical_numbered(block->physical) : NULL;

	if (!driver() || !driver()->cuMemExportToShareableHandle || !driver()->cuMemImportFromShareableHandle)
		return false;
	return created ? created->held && created->property.handle_types & POSIX_DESCRIPTOR : !LOAD(&descriptors_refused);
}

int physical_export(const struct block *block, int *descriptor)
{
	const struct physical *created = block->physical ? physical_numbered(block->physical) : NULL;

	if (!physical_is_exportable(block))
		return CUDA_NOT_SUPPORTED;
	return driver()->cuMemExportToShareableHandle(descriptor, created ? created->handle : block->handle, POSIX_DESCRIPTOR,
						      0);
}

int physical_import(struct block *block, int descriptor)
{
	struct physical *created = block->physical ? physical_numbered(block->physical) : NULL;
	uint64_t handle;
	int status = driver()->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)descriptor, POSIX_DESCRIPTOR);

	if (!status)
		status = map(block, created, handle);
	if (!status)
		block_is_imported(block, true);
	return status;
}

int physical_create(const struct block *block, uint64_t *handle)
{
	return create(handle, block, block->physical ? physical_numbered(block->physical) : NULL);
}

/* The handle of what a block has mapped; one that the program released is retained again. */
static int current(const struct block *block, const struct physical *created, uint64_t *handle)
{
	if (!created || created->held) {
		*handle = created ? created->handle : block->handle;
		return 0;
	}
	if (!driver()->cuMemRetainAllocationHandle)
		return CUDA_NOT_SUPPORTED;
	return driver()->cuMemRetainAllocationHandle(handle, (void *)(uintptr_t)block->address);
}

int physical_replace(struct block *block, uint64_t handle)
{
	struct physical *created = block->physical ? physical_numbered(block->physical) : NULL;
	uint64_t old = 0;
	int status = current(block, created, &old);

	if (!status)
		status = driver()->cuMemUnmap(block->address, block->bytes);
	if (status) {
		if (old && created && !created->held)
			driver()->cuMemRelease(old);
		driver()->cuMemRelease(handle);
		return status;
	}
	block->away = true;
	status = place(block, handle);
	if (!status) {
		driver()->cuMemRelease(old);
		settle(block, created, handle);
		block_is_imported(block, false);
		return 0;
	}
	if (place(block, old))
		return status; /* it stays away; both handles keep the content */
	settle(block, created, old);
	driver()->cuMemRelease(handle);
	return status;
}

int physical_detach(struct block *block)
{
	struct physical *created = block->physical ? physical_numbered(block->physical) : NULL;
	int status = driver()->cuMemUnmap(block->address, block->bytes);

	if (status)
		return status;
	block->away = true;
	block_is_imported(block, false);
	if (!created || created->held)
		status = driver()->cuMemRelease(created ? created->handle : block->handle);
	return status;
}
