/* Reservations, physical memory and mappings, and their way to the host and back.
 *
 * Physical memory is a shared mapping at some place of its own ("home"), and where a program maps it, the same pages appear a
 * second time: no descriptor is needed, two mappings of one memory show the same bytes, and what is mapped nowhere is kept.
 * A reservation is an entry in a table alone: nothing else is ever put into that part of the address space.
 */
#define _GNU_SOURCE
#include "virtual.h"

#include <string.h>
#include <sys/mman.h>

#include "memory.h"
#include "process.h"

#define MAX_RESERVATIONS 4096
#define MAX_PHYSICAL 8192
#define MAX_MAPPINGS 16384

static struct reservation {
	CUdeviceptr address; /* 0: unused */
	uint64_t bytes;
} reservations[MAX_RESERVATIONS];

static struct physical {
	uint64_t bytes; /* 0: unused */
	uint32_t generation; /* of this place in the table, so that an old handle is no handle */
	uint32_t references;
	uint32_t mappings;
	CUmemAllocationProp prop;
	void *home; /* NULL while checkpointed */
	void *host; /* while checkpointed: the contents */
} physical[MAX_PHYSICAL];

static struct mapping {
	CUdeviceptr address; /* 0: unused */
	uint64_t bytes;
	struct physical *of;
	bool attached; /* not while checkpointed */
	unsigned char access[MAX_GPUS];
} mappings[MAX_MAPPINGS];

static int reservation_count, physical_count, mapping_count; /* places that were ever used */

/* A free place of a table, NULL: it is full. `used` is a member that is 0 in free ones. */
#define FREE_PLACE(table, count, used, room)                        \
	({                                                          \
		int place_ = 0;                                     \
		while (place_ < (count) && (table)[place_].used)    \
			place_++;                                   \
		if (place_ == (count) && (count) < (room))          \
			(count)++;                                  \
		place_ < (room) ? &(table)[place_] : NULL;          \
	})

static bool whole_grains(uint64_t number)
{
	return number % GRAIN_BYTES == 0;
}

static bool overlap(CUdeviceptr first, uint64_t first_bytes, CUdeviceptr second, uint64_t second_bytes)
{
	return first < second + second_bytes && second < first + first_bytes;
}

static struct physical *physical_of(CUmemGenericAllocationHandle handle)
{
	uint64_t place = handle & 0xffff;
	struct physical *found = place && place <= MAX_PHYSICAL ? &physical[place - 1] : NULL;

	return found && found->bytes && found->references && found->generation == handle >> 16 ? found : NULL;
}

static CUmemGenericAllocationHandle handle_of(const struct physical *memory)
{
	return (uint64_t)memory->generation << 16 | (uint64_t)(memory - physical + 1);
}

static struct mapping *mapping_at(CUdeviceptr address)
{
	for (int i = 0; i < mapping_count; i++)
		if (mappings[i].address && address >= mappings[i].address && address - mappings[i].address < mappings[i].bytes)
			return &mappings[i];
	return NULL;
}

/* Whether a range is made of whole mappings, one after the other. */
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

static bool make_home(struct physical *memory)
{
	void *home = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (home == MAP_FAILED)
		return false;
	madvise(home, memory->bytes, MADV_DONTFORK); /* a child cannot use the GPU's memory */
	memory->home = home;
	return true;
}

static bool protect(const struct mapping *mapping)
{
	int protection = PROT_NONE;

	for (int i = 0; i < MAX_GPUS; i++)
		protection |= mapping->access[i] == ACCESS_READ_WRITE ? PROT_READ | PROT_WRITE :
			      mapping->access[i] == ACCESS_READ	      ? PROT_READ :
									PROT_NONE;
	return mprotect((void *)mapping->address, mapping->bytes, protection) == 0;
}

/* Shows the memory's pages at the mapping's address too: what a move of nothing does to a shared mapping. */
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

static CUresult drop_if_unused(struct physical *memory)
{
	if (memory->references || memory->mappings)
		return CUDA_SUCCESS;
	munmap(memory->home, memory->bytes);
	*memory = (struct physical){.generation = memory->generation};
	return memory_account(0, 0);
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

CUresult virtual_create(CUmemGenericAllocationHandle *handle, uint64_t bytes, const CUmemAllocationProp *prop)
{
	struct physical *memory;
	CUresult result;

	if (!handle || !bytes || !whole_grains(bytes))
		return CUDA_ERROR_INVALID_VALUE;
	memory_lock();
	memory = FREE_PLACE(physical, physical_count, bytes, MAX_PHYSICAL);
	result = memory ? memory_account(prop->location.id, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS) {
		*memory = (struct physical){
			.bytes = bytes, .generation = memory->generation + 1, .references = 1, .prop = *prop};
		if (make_home(memory)) {
			*handle = handle_of(memory);
		} else {
			memory->bytes = 0;
			memory_account(0, 0);
			result = CUDA_ERROR_OPERATING_SYSTEM;
		}
	}
	memory_unlock();
	return result;
}

CUresult virtual_release(CUmemGenericAllocationHandle handle)
{
	struct physical *memory;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	memory_lock();
	memory = physical_of(handle);
	if (memory) {
		memory->references--;
		result = drop_if_unused(memory);
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
		*handle = handle_of(mapping->of);
	}
	memory_unlock();
	return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult virtual_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	struct physical *memory;

	memory_lock();
	memory = physical_of(handle);
	if (memory)
		*prop = memory->prop;
	memory_unlock();
	return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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
			drop_if_unused(mapping->of);
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

void virtual_add_held(uint64_t bytes[MAX_GPUS])
{
	for (int i = 0; i < physical_count; i++)
		bytes[physical[i].prop.location.id] += physical[i].bytes;
}

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
	bool done = true;

	for (int i = 0; done && i < physical_count; i++) {
		void *host;

		if (!physical[i].bytes)
			continue;
		host = mmap(NULL, physical[i].bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		done = host != MAP_FAILED;
		if (done)
			physical[i].host = memcpy(host, physical[i].home, physical[i].bytes);
	}
	for (int i = 0; i < mapping_count && done; i++)
		if (mappings[i].address)
			detach(&mappings[i]);
	for (int i = 0; i < physical_count; i++) {
		if (!physical[i].host)
			continue;
		munmap(done ? physical[i].home : physical[i].host, physical[i].bytes);
		*(done ? &physical[i].home : &physical[i].host) = NULL;
	}
	return done;
}

bool virtual_to_devices(void)
{
	for (int i = 0; i < physical_count; i++) {
		if (!physical[i].host)
			continue;
		if (!make_home(&physical[i]))
			return false;
		memcpy(physical[i].home, physical[i].host, physical[i].bytes);
		munmap(physical[i].host, physical[i].bytes);
		physical[i].host = NULL;
	}
	for (int i = 0; i < mapping_count; i++)
		if (mappings[i].address && !mappings[i].attached && !attach(&mappings[i]))
			return false;
	return true;
}

void virtual_forget_after_fork(void)
{
	memset(reservations, 0, sizeof reservations);
	memset(physical, 0, sizeof physical);
	memset(mappings, 0, sizeof mappings);
	reservation_count = physical_count = mapping_count = 0;
}
