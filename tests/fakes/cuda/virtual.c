/* Reservations and mappings, and their state at a checkpoint.
 *
 * A reservation is only an entry in a table, because nothing else uses that part of the address space. A mapping shows
 * the pages of physical memory (physical.c) a second time, at an address that the program chooses.
 */
#define _GNU_SOURCE
#include "virtual.h"

#include <string.h>
#include <sys/mman.h>

#include "memory.h"
#include "physical.h"
#include "table.h"

#define MAX_RESERVATIONS 4096
#define MAX_MAPPINGS 16384

static struct reservation {
	CUdeviceptr address; /* 0: unused */
	uint64_t bytes;
} reservations[MAX_RESERVATIONS];

static struct mapping {
	CUdeviceptr address; /* 0: unused */
	uint64_t bytes;
	struct physical *of;
	bool attached; /* false while checkpointed */
	unsigned char access[MAX_GPUS];
} mappings[MAX_MAPPINGS];

static int reservation_count, mapping_count; /* slots that were ever used */

static bool overlap(CUdeviceptr first, uint64_t first_bytes, CUdeviceptr second, uint64_t second_bytes)
{
	return first < second + second_bytes && second < first + first_bytes;
}

static struct mapping *mapping_at(CUdeviceptr address)
{
	for (int i = 0; i < mapping_count; i++)
		if (mappings[i].address && address >= mappings[i].address &&
		    address - mappings[i].address < mappings[i].bytes)
			return &mappings[i];
	return NULL;
}

/* Whether a range consists of whole, adjacent mappings. */
static bool whole_mappings(CUdeviceptr address, uint64_t bytes)
{
	CUdeviceptr end = address + bytes;

	while (address < end) {
		struct mapping *mapping = mapping_at(address);

		if (!mapping || mapping->address != address)
			return false;
		address += mapping->bytes;
	}
	return bytes && address == end;
}

/* ---------------------------------------------------------------- pages */

static bool protect(const struct mapping *mapping)
{
	int protection = PROT_NONE;

	for (int i = 0; i < MAX_GPUS; i++)
		protection |= mapping->access[i] == ACCESS_READ_WRITE ? PROT_READ | PROT_WRITE :
			      mapping->access[i] == ACCESS_READ       ? PROT_READ :
									PROT_NONE;
	return mprotect((void *)mapping->address, mapping->bytes, protection) == 0;
}

/* Shows the memory's pages at the mapping's address too: mremap of a shared mapping with an old size of 0 does that. */
static bool attach(struct mapping *mapping)
{
	void *place = mremap(mapping->of->home, 0, mapping->bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)mapping->address);

	if (place == MAP_FAILED)
		return false;
	mapping->attached = true;
	return madvise(place, mapping->bytes, MADV_DONTFORK) == 0 && protect(mapping);
}

static void detach(struct mapping *mapping)
{
	if (mapping->attached)
		munmap((void *)mapping->address, mapping->bytes);
	mapping->attached = false;
}

/* ---------------------------------------------------------------- a program's calls */

CUresult virtual_reserve(CUdeviceptr *address, uint64_t bytes, uint64_t alignment, CUdeviceptr wanted)
{
	struct reservation *place;
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	if (!address || !bytes || !whole_grains(bytes) || (alignment & (alignment - 1)))
		return CUDA_ERROR_INVALID_VALUE;
	memory_lock();
	place = FREE_PLACE(reservations, reservation_count, address, MAX_RESERVATIONS);
	*address = place ? memory_place(bytes, alignment, wanted) : 0;
	if (*address) {
		*place = (struct reservation){.address = *address, .bytes = bytes};
		result = CUDA_SUCCESS;
	}
	memory_unlock();
	return result;
}

CUresult virtual_unreserve(CUdeviceptr address, uint64_t bytes)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	memory_lock();
	for (int i = 0; i < reservation_count; i++) {
		bool used = !address || reservations[i].address != address || reservations[i].bytes != bytes;

		for (int j = 0; !used && j < mapping_count; j++)
			used = mappings[j].address && overlap(address, bytes, mappings[j].address, mappings[j].bytes);
		if (used)
			continue;
		reservations[i] = (struct reservation){0};
		result = CUDA_SUCCESS;
	}
	memory_unlock();
	return result;
}

CUresult virtual_retain(CUmemGenericAllocationHandle *handle, CUdeviceptr address)
{
	struct mapping *mapping;

	memory_lock();
	mapping = mapping_at(address);
	if (mapping) {
		mapping->of->references++;
		*handle = physical_handle(mapping->of);
	}
	memory_unlock();
	return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Whether a range lies in one reservation, and nothing is mapped there. */
static bool vacant(CUdeviceptr address, uint64_t bytes)
{
	bool reserved = false;

	for (int i = 0; i < reservation_count; i++)
		reserved |= reservations[i].address && address >= reservations[i].address &&
			    address + bytes <= reservations[i].address + reservations[i].bytes;
	for (int i = 0; i < mapping_count; i++)
		if (mappings[i].address && overlap(address, bytes, mappings[i].address, mappings[i].bytes))
			return false;
	return reserved;
}

CUresult virtual_map(CUdeviceptr address, uint64_t bytes, uint64_t offset, CUmemGenericAllocationHandle handle)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	struct physical *memory;
	struct mapping *mapping;

	memory_lock();
	memory = physical_of(handle);
	if (memory && bytes && whole_grains(bytes) && whole_grains(address) && !offset && bytes <= memory->bytes &&
	    vacant(address, bytes)) {
		mapping = FREE_PLACE(mappings, mapping_count, address, MAX_MAPPINGS);
		result = CUDA_ERROR_OUT_OF_MEMORY;
		if (mapping) {
			*mapping = (struct mapping){.address = address, .bytes = bytes, .of = memory};
			memory->mappings++;
			result = attach(mapping) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
		}
		if (mapping && result != CUDA_SUCCESS) {
			memory->mappings--;
			detach(mapping);
			mapping->address = 0;
		}
	}
	memory_unlock();
	return result;
}

CUresult virtual_unmap(CUdeviceptr address, uint64_t bytes)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	memory_lock();
	if (whole_mappings(address, bytes)) {
		result = CUDA_SUCCESS;
		for (int i = 0; i < mapping_count; i++) {
			struct mapping *mapping = &mappings[i];

			if (!mapping->address || !overlap(address, bytes, mapping->address, mapping->bytes))
				continue;
			detach(mapping);
			mapping->address = 0;
			mapping->of->mappings--;
			physical_drop_if_unused(mapping->of);
		}
	}
	memory_unlock();
	return result;
}

CUresult virtual_set_access(CUdeviceptr address, uint64_t bytes, int gpu, int flags)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	memory_lock();
	if (whole_mappings(address, bytes)) {
		result = CUDA_SUCCESS;
		for (int i = 0; i < mapping_count; i++) {
			struct mapping *mapping = &mappings[i];

			if (!mapping->address || !overlap(address, bytes, mapping->address, mapping->bytes))
				continue;
			mapping->access[gpu] = (unsigned char)flags;
			if (!protect(mapping))
				result = CUDA_ERROR_OPERATING_SYSTEM;
		}
	}
	memory_unlock();
	return result;
}

CUresult virtual_get_access(CUdeviceptr address, int gpu, unsigned long long *flags)
{
	struct mapping *mapping;

	memory_lock();
	mapping = mapping_at(address);
	if (mapping)
		*flags = mapping->access[gpu];
	memory_unlock();
	return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool virtual_range(CUdeviceptr address, CUdeviceptr *base, uint64_t *bytes, CUmemAllocationProp *prop)
{
	struct mapping *mapping;

	memory_lock();
	mapping = mapping_at(address);
	if (mapping) {
		*base = mapping->address;
		*bytes = mapping->bytes;
		*prop = mapping->of->prop;
	}
	memory_unlock();
	return mapping != NULL;
}

/* ---------------------------------------------------------------- for memory.c */

CUdeviceptr virtual_taken_until(CUdeviceptr address, uint64_t bytes)
{
	for (int i = 0; i < reservation_count; i++)
		if (reservations[i].address && overlap(address, bytes, reservations[i].address, reservations[i].bytes))
			return reservations[i].address + reservations[i].bytes;
	return 0;
}

static bool some_gpu_may(const struct mapping *mapping, int flags)
{
	for (int i = 0; i < MAX_GPUS; i++)
		if ((mapping->access[i] & flags) == flags)
			return true;
	return false;
}

bool virtual_accessible(CUdeviceptr address, uint64_t bytes, int flags)
{
	for (CUdeviceptr end = address + bytes, at = address; at < end;) {
		struct mapping *mapping = mapping_at(at);

		if (!mapping || !some_gpu_may(mapping, flags))
			return false;
		at = mapping->address + mapping->bytes;
	}
	return bytes != 0;
}

bool virtual_to_host(void)
{
	if (!physical_copy_to_host())
		return false;
	for (int i = 0; i < mapping_count; i++)
		if (mappings[i].address)
			detach(&mappings[i]);
	physical_leave_devices();
	return true;
}

bool virtual_to_devices(void)
{
	if (!physical_to_devices())
		return false;
	for (int i = 0; i < mapping_count; i++)
		if (mappings[i].address && !mappings[i].attached && !attach(&mappings[i]))
			return false;
	return true;
}

void virtual_forget_after_fork(void)
{
	memset(reservations, 0, sizeof reservations);
	memset(mappings, 0, sizeof mappings);
	reservation_count = mapping_count = 0;
	physical_forget_after_fork();
}
