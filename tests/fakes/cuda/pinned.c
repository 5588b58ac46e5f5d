/* Host memory that the GPU can reach: allocated as pinned memory, or registered by the program. */
#define _GNU_SOURCE
#include "pinned.h"

#include <pthread.h>
#include <sys/mman.h>

#include "call.h"
#include "copies.h"
#include "faults.h"

#define MAX_RANGES 4096

static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;
static struct range {
	uintptr_t address; /* 0: unused */
	uint64_t bytes;
	bool allocated; /* false: registered */
} ranges[MAX_RANGES];

static struct range *overlapping(uintptr_t address, uint64_t bytes)
{
	for (int i = 0; i < MAX_RANGES; i++)
		if (ranges[i].address && address < ranges[i].address + ranges[i].bytes && ranges[i].address < address + bytes)
			return &ranges[i];
	return NULL;
}

static CUresult add(uintptr_t address, uint64_t bytes, bool allocated)
{
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	pthread_mutex_lock(&table);
	if (overlapping(address, bytes))
		result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	for (int i = 0; result == CUDA_ERROR_OUT_OF_MEMORY && i < MAX_RANGES; i++) {
		if (ranges[i].address)
			continue;
		ranges[i] = (struct range){.address = address, .bytes = bytes, .allocated = allocated};
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table);
	return result;
}

/* The length of the memory that begins there; 0: none. */
static uint64_t take_out(uintptr_t address, bool allocated)
{
	uint64_t bytes = 0;
	struct range *range;

	pthread_mutex_lock(&table);
	range = overlapping(address, 1);
	if (range && range->address == address && range->allocated == allocated) {
		bytes = range->bytes;
		range->address = 0;
	}
	pthread_mutex_unlock(&table);
	return bytes;
}

bool pinned_contains(const void *address, uint64_t bytes)
{
	struct range *range;
	bool found;

	pthread_mutex_lock(&table);
	range = overlapping((uintptr_t)address, bytes);
	found = range && (uintptr_t)address >= range->address && (uintptr_t)address + bytes <= range->address + range->bytes;
	pthread_mutex_unlock(&table);
	return found;
}

/* Shared and anonymous like the driver's, so that it is "/dev/zero (deleted)" in /proc/PID/maps. */
static CUresult allocate(void **address, uint64_t bytes)
{
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
	void *place;

	if (!address || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	place = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (place != MAP_FAILED)
		result = add((uintptr_t)place, bytes, true);
	if (place != MAP_FAILED && result != CUDA_SUCCESS)
		munmap(place, bytes);
	if (result == CUDA_SUCCESS)
		*address = place;
	return result;
}

static CUresult unallocate(void *address)
{
	uint64_t bytes;

	copies_finish(EVERY_STREAM);
	bytes = take_out((uintptr_t)address, true);
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	munmap(address, bytes);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags)
{
	(void)flags;
	CALL_ALONE(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : (CUresult)fault_in_call("pin");
		   if (result == CUDA_SUCCESS) result = allocate(address, bytes););
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t bytes)
{
	return cuMemHostAlloc(address, bytes, 0);
}

EXPORT CUresult cuMemFreeHost(void *address)
{
	CALL_ALONE(result = unallocate(address););
}

/* A query: it does not need the driver's lock, but takes the lock that allocating and freeing need. */
EXPORT CUresult cuMemHostGetFlags(unsigned int *flags, void *address)
{
	CUresult result;

	pthread_mutex_lock(&table);
	result = (CUresult)fault_in_call("ask");
	*flags = 0;
	if (result == CUDA_SUCCESS && !overlapping((uintptr_t)address, 1))
		result = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&table);
	return result;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags)
{
	(void)flags;
	CALL(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : (CUresult)fault_in_call("pin");
	     if (result == CUDA_SUCCESS) result =
		     address && bytes ? add((uintptr_t)address, bytes, false) : CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemHostUnregister(void *address)
{
	CALL(copies_finish(EVERY_STREAM);
	     if (!take_out((uintptr_t)address, false)) result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;);
}
