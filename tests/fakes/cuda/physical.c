/* Physical device memory, and its copies to the host and back.
 *
 * Each memory is a shared mapping at a private address ("home"). Where a program maps it, the same pages appear a
 * second time. So no descriptor is needed, two mappings of one memory show the same bytes, and unmapped memory is kept.
 */
#define _GNU_SOURCE
#include "physical.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "memory.h"
#include "table.h"

#define MAX_PHYSICAL 8192

static struct physical physical[MAX_PHYSICAL];
static int physical_count; /* slots that were ever used */

struct physical *physical_of(CUmemGenericAllocationHandle handle)
{
	uint64_t place = handle & 0xffff;
	struct physical *found = place && place <= MAX_PHYSICAL ? &physical[place - 1] : NULL;

	return found && found->bytes && found->references && found->generation == handle >> 16 ? found : NULL;
}

CUmemGenericAllocationHandle physical_handle(const struct physical *memory)
{
	return (uint64_t)memory->generation << 16 | (uint64_t)(memory - physical + 1);
}

/* `file`: of another process's memory, or -1. */
static bool make_home(struct physical *memory, int file)
{
	int flags = MAP_SHARED | MAP_NORESERVE | (file < 0 ? MAP_ANONYMOUS : 0);
	void *home = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, flags, file, 0);

	if (home == MAP_FAILED)
		return false;
	madvise(home, memory->bytes, MADV_DONTFORK); /* a child cannot use the GPU's memory */
	memory->home = home;
	return true;
}

CUresult physical_drop_if_unused(struct physical *memory)
{
	if (memory->references || memory->mappings)
		return CUDA_SUCCESS;
	munmap(memory->home, memory->bytes);
	*memory = (struct physical){.generation = memory->generation};
	return memory_account(0, 0);
}

static CUresult add(CUmemGenericAllocationHandle *handle, struct physical fresh, int file)
{
	struct physical *memory;
	CUresult result;

	memory_lock();
	memory = FREE_PLACE(physical, physical_count, bytes, MAX_PHYSICAL);
	result = !memory        ? CUDA_ERROR_OUT_OF_MEMORY :
		 fresh.imported ? CUDA_SUCCESS :
				  memory_account(fresh.prop.location.id, fresh.bytes);
	if (result == CUDA_SUCCESS) {
		fresh.generation = memory->generation + 1;
		fresh.references = 1;
		*memory = fresh;
		if (make_home(memory, file)) {
			*handle = physical_handle(memory);
		} else {
			memory->bytes = 0;
			memory_account(0, 0);
			result = CUDA_ERROR_OPERATING_SYSTEM;
		}
	}
	memory_unlock();
	return result;
}

CUresult physical_create(CUmemGenericAllocationHandle *handle, uint64_t bytes, const CUmemAllocationProp *prop)
{
	if (!handle || !bytes || !whole_grains(bytes))
		return CUDA_ERROR_INVALID_VALUE;
	return add(handle, (struct physical){.bytes = bytes, .prop = *prop}, -1);
}

/* For root, the kernel shows the pages of a mapping as a file. */
CUresult physical_export(int *file, CUmemGenericAllocationHandle handle)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	struct physical *memory;
	char path[64];

	memory_lock();
	memory = physical_of(handle);
	if (memory && !memory->imported && memory->prop.requestedHandleTypes & HANDLE_FILE) {
		snprintf(path, sizeof path, "/proc/self/map_files/%lx-%lx", (long)memory->home,
			 (long)memory->home + (long)memory->bytes);
		*file = open(path, O_RDWR);
		result = *file < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
	}
	memory_unlock();
	return result;
}

/* As if both processes saw one GPU. */
CUresult physical_import(CUmemGenericAllocationHandle *handle, int file)
{
	struct physical fresh = {
		.imported = true,
		.prop = {.type = ALLOCATION_PINNED, .requestedHandleTypes = HANDLE_FILE, .location = {LOCATION_DEVICE, 0}}};
	struct stat about;

	if (fstat(file, &about) || !about.st_size || !whole_grains((uint64_t)about.st_size))
		return CUDA_ERROR_INVALID_VALUE;
	fresh.bytes = (uint64_t)about.st_size;
	return add(handle, fresh, file);
}

CUresult physical_release(CUmemGenericAllocationHandle handle)
{
	struct physical *memory;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	memory_lock();
	memory = physical_of(handle);
	if (memory) {
		memory->references--;
		result = physical_drop_if_unused(memory);
	}
	memory_unlock();
	return result;
}

CUresult physical_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	struct physical *memory;

	memory_lock();
	memory = physical_of(handle);
	if (memory)
		*prop = memory->prop;
	memory_unlock();
	return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void physical_add_held(uint64_t bytes[MAX_GPUS])
{
	for (int i = 0; i < physical_count; i++)
		bytes[physical[i].prop.location.id] += physical[i].imported ? 0 : physical[i].bytes;
}

bool physical_has_imported(void)
{
	for (int i = 0; i < physical_count; i++)
		if (physical[i].bytes && physical[i].imported)
			return true;
	return false;
}

bool physical_copy_to_host(void)
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
	for (int i = 0; !done && i < physical_count; i++) {
		if (physical[i].host)
			munmap(physical[i].host, physical[i].bytes);
		physical[i].host = NULL;
	}
	return done;
}

void physical_leave_devices(void)
{
	for (int i = 0; i < physical_count; i++) {
		if (physical[i].home)
			munmap(physical[i].home, physical[i].bytes);
		physical[i].home = NULL;
	}
}

bool physical_to_devices(void)
{
	for (int i = 0; i < physical_count; i++) {
		if (!physical[i].host)
			continue;
		if (!make_home(&physical[i], -1))
			return false;
		memcpy(physical[i].home, physical[i].host, physical[i].bytes);
		munmap(physical[i].host, physical[i].bytes);
		physical[i].host = NULL;
	}
	return true;
}

void physical_forget_after_fork(void)
{
	memset(physical, 0, sizeof physical);
	physical_count = 0;
}
