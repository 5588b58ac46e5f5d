/* Physical device memory, and its way to the host and back.
 *
 * It is a shared mapping at some place of its own ("home"), and where a program maps it, the same pages appear a second
 * time: no descriptor is needed, two mappings of one memory show the same bytes, and what is mapped nowhere is kept.
 */
#define _GNU_SOURCE
#include "physical.h"

#include <string.h>
#include <sys/mman.h>

#include "memory.h"
#include "table.h"

#define MAX_PHYSICAL 8192

static struct physical physical[MAX_PHYSICAL];
static int physical_count; /* places that were ever used */

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

static bool make_home(struct physical *memory)
{
	void *home = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

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

CUresult physical_create(CUmemGenericAllocationHandle *handle, uint64_t bytes, const CUmemAllocationProp *prop)
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
		bytes[physical[i].prop.location.id] += physical[i].bytes;
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
		if (!make_home(&physical[i]))
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
