/* Blocks of device memory, and their copies to the host and back.
 *
 * Invariant: this process's entry in the ledger is the sum of its blocks, its physical memory (physical.c) and its
 * contexts, and empty while the contents are in host memory. The table's mutex is only taken behind the gate, so no
 * parked thread holds it when a driver thread reads the table.
 */
#define _GNU_SOURCE
#include "memory.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "devices.h"
#include "ledger.h"
#include "physical.h"
#include "process.h"
#include "table.h"
#include "virtual.h"

#define MAX_BLOCKS 4096
#ifndef FIRST_ADDRESS /* set at build time where ThreadSanitizer needs this address range */
#define FIRST_ADDRESS 0x300000000000ULL
#define END_ADDRESS 0x400000000000ULL
#endif
#define FIRST_MANAGED 0x7e0000000000ULL

static struct block {
	CUdeviceptr address; /* 0: unused */
	uint64_t bytes;      /* as asked for */
	int gpu;      /* -1: managed */
	void *host;      /* while checkpointed: the contents */
} blocks[MAX_BLOCKS];

static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;
static bool has_context[MAX_GPUS];
static CUdeviceptr next_managed = FIRST_MANAGED;

static uint64_t grains(uint64_t bytes)
{
	return (bytes + GRAIN_BYTES - 1) / GRAIN_BYTES * GRAIN_BYTES;
}

/* Updates the ledger with the memory in use, plus `more` on one GPU. */
static CUresult account(const struct node *node, int gpu, uint64_t more)
{
	uint64_t bytes[MAX_GPUS] = {0};

	for (int i = 0; i < MAX_BLOCKS; i++)
		if (blocks[i].address && blocks[i].gpu >= 0)
			bytes[blocks[i].gpu] += grains(blocks[i].bytes);
	physical_add_held(bytes);
	for (unsigned int i = 0; i < node->gpu_count; i++)
		if (has_context[i])
			bytes[i] += node->context_bytes;
	bytes[gpu] += more;
	switch (ledger_hold(node, bytes)) {
	case LEDGER_DONE:
		return CUDA_SUCCESS;
	case LEDGER_FULL:
		return CUDA_ERROR_OUT_OF_MEMORY;
	default:
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
}

CUresult memory_account(int gpu, uint64_t more)
{
	return account(process_node(), gpu, more);
}

void memory_lock(void)
{
	pthread_mutex_lock(&table);
}

void memory_unlock(void)
{
	pthread_mutex_unlock(&table);
}

/* The end of a block or reservation that overlaps; 0: none. */
static CUdeviceptr taken_until(CUdeviceptr address, uint64_t bytes)
{
	for (int i = 0; i < MAX_BLOCKS; i++)
		if (blocks[i].address && address < blocks[i].address + grains(blocks[i].bytes) &&
		    blocks[i].address < address + bytes)
			return blocks[i].address + grains(blocks[i].bytes);
	return virtual_taken_until(address, bytes);
}

/* The lowest free address: like the driver, it soon reuses an address that was freed. */
CUdeviceptr memory_place(uint64_t bytes, uint64_t alignment, CUdeviceptr wanted)
{
	CUdeviceptr address = FIRST_ADDRESS, taken;

	if (alignment < GRAIN_BYTES)
		alignment = GRAIN_BYTES;
	if (bytes > END_ADDRESS - FIRST_ADDRESS)
		return 0;
	if (wanted >= FIRST_ADDRESS && wanted <= END_ADDRESS - bytes && wanted % alignment == 0 &&
	    !taken_until(wanted, bytes))
		return wanted;
	while ((taken = taken_until(address, bytes)))
		address = (taken + alignment - 1) / alignment * alignment;
	return address <= END_ADDRESS - bytes ? address : 0;
}

static bool map_device(CUdeviceptr address, uint64_t bytes)
{
	void *place = mmap((void *)address, grains(bytes), PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);

	/* A child cannot use the GPU's memory, and copies of it would become part of the child's dump. */
	return place != MAP_FAILED && madvise(place, grains(bytes), MADV_DONTFORK) == 0;
}

static struct block *find(CUdeviceptr address, uint64_t bytes)
{
	for (int i = 0; i < MAX_BLOCKS; i++)
		if (blocks[i].address && address >= blocks[i].address &&
		    address + bytes <= blocks[i].address + blocks[i].bytes)
			return &blocks[i];
	return NULL;
}

static struct block *unused(void)
{
	for (int i = 0; i < MAX_BLOCKS; i++)
		if (!blocks[i].address)
			return &blocks[i];
	return NULL;
}

CUresult memory_add_context(int gpu)
{
	CUresult result = CUDA_SUCCESS;

	pthread_mutex_lock(&table);
	if (!has_context[gpu]) {
		result = account(process_node(), gpu, process_node()->context_bytes);
		has_context[gpu] = result == CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table);
	return result;
}

CUresult memory_allocate(int gpu, uint64_t bytes, CUdeviceptr *address)
{
	CUresult result;
	struct block *block;

	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table);
	block = unused();
	result = block ? account(process_node(), gpu, grains(bytes)) : CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS) {
		*address = memory_place(grains(bytes), 0, 0);
		if (*address && map_device(*address, bytes))
			*block = (struct block){.address = *address, .bytes = bytes, .gpu = gpu};
		else
			result = CUDA_ERROR_OPERATING_SYSTEM;
	}
	pthread_mutex_unlock(&table);
	return result;
}

CUresult memory_allocate_managed(uint64_t bytes, CUdeviceptr *address)
{
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
	struct block *block;

	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table);
	block = unused();
	for (int tries = 0; block && tries < 64 && result != CUDA_SUCCESS; tries++, next_managed += grains(bytes)) {
		if (!devices_map_uvm(next_managed, grains(bytes)) && !map_device(next_managed, bytes))
			continue;
		*block = (struct block){.address = next_managed, .bytes = bytes, .gpu = -1};
		*address = next_managed;
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table);
	return result;
}

CUresult memory_free(CUdeviceptr address)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	struct block *block;

	pthread_mutex_lock(&table);
	block = find(address, 1);
	if (block && block->address == address) {
		munmap((void *)address, grains(block->bytes));
		*block = (struct block){0};
		result = account(process_node(), 0, 0);
	}
	pthread_mutex_unlock(&table);
	return result;
}

CUresult memory_drop_context(int gpu)
{
	CUresult result;

	pthread_mutex_lock(&table);
	for (int i = 0; i < MAX_BLOCKS; i++) {
		if (!blocks[i].address || blocks[i].gpu != gpu)
			continue;
		munmap((void *)blocks[i].address, grains(blocks[i].bytes));
		blocks[i] = (struct block){0};
	}
	has_context[gpu] = false;
	result = account(process_node(), 0, 0);
	pthread_mutex_unlock(&table);
	return result;
}

static bool accessible(CUdeviceptr address, uint64_t bytes, int flags)
{
	bool found;

	pthread_mutex_lock(&table);
	found = find(address, bytes) != NULL || virtual_accessible(address, bytes, flags);
	pthread_mutex_unlock(&table);
	return found;
}

bool memory_can_read(CUdeviceptr address, uint64_t bytes)
{
	return accessible(address, bytes, ACCESS_READ);
}

bool memory_can_write(CUdeviceptr address, uint64_t bytes)
{
	return accessible(address, bytes, ACCESS_READ_WRITE);
}

bool memory_range(CUdeviceptr address, CUdeviceptr *base, uint64_t *bytes, int *gpu)
{
	struct block *block;

	pthread_mutex_lock(&table);
	block = find(address, 1);
	if (block) {
		*base = block->address;
		*bytes = block->bytes;
		*gpu = block->gpu;
	}
	pthread_mutex_unlock(&table);
	return block != NULL;
}

CUresult memory_room(int gpu, uint64_t *free_bytes, uint64_t *total_bytes)
{
	static struct holder holders[256];
	const struct gpu *wanted = &process_node()->gpus[gpu];
	uint64_t used = 0;

	pthread_mutex_lock(&table);
	int count = ledger_others(process_node(), holders, 255);
	holders[count++] = *ledger_own();
	for (int i = 0; i < count; i++)
		for (int j = 0; j < MAX_GPUS; j++)
			if (memcmp(holders[i].holdings[j].uuid, wanted->uuid, 16) == 0)
				used += holders[i].holdings[j].bytes;
	pthread_mutex_unlock(&table);
	*total_bytes = wanted->memory_bytes;
	*free_bytes = used < wanted->memory_bytes ? wanted->memory_bytes - used : 0;
	return CUDA_SUCCESS;
}

bool memory_has_managed(void)
{
	for (int i = 0; i < MAX_BLOCKS; i++)
		if (blocks[i].address && blocks[i].gpu < 0)
			return true;
	return false;
}

static bool block_to_host(struct block *block)
{
	void *host = mmap(NULL, grains(block->bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (host == MAP_FAILED)
		return false;
	memcpy(host, (void *)block->address, block->bytes);
	munmap((void *)block->address, grains(block->bytes));
	block->host = host;
	return true;
}

static bool block_to_device(struct block *block)
{
	if (!map_device(block->address, block->bytes))
		return false;
	memcpy((void *)block->address, block->host, block->bytes);
	munmap(block->host, grains(block->bytes));
	block->host = NULL;
	return true;
}

static void undo_to_host(void)
{
	for (int i = 0; i < MAX_BLOCKS; i++)
		if (blocks[i].host)
			block_to_device(&blocks[i]);
}

CUresult memory_to_host(unsigned int delay_ms)
{
	for (int i = 0; i < MAX_BLOCKS; i++) {
		if (blocks[i].address && !block_to_host(&blocks[i])) {
			undo_to_host();
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		if (i == 0)
			sleep_ms(delay_ms);
	}
	if (!virtual_to_host()) {
		undo_to_host();
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return CUDA_SUCCESS;
}

CUresult memory_to_devices(const struct node *node, unsigned int delay_ms)
{
	CUresult result = physical_has_imported() ? CUDA_ERROR_NOT_SUPPORTED : account(node, 0, 0);

	if (result != CUDA_SUCCESS)
		return result;
	for (int i = 0; i < MAX_BLOCKS; i++) {
		if (blocks[i].host && !block_to_device(&blocks[i])) {
			ledger_drop();
			return CUDA_ERROR_OPERATING_SYSTEM;
		}
		if (i == 0)
			sleep_ms(delay_ms);
	}
	if (!virtual_to_devices()) {
		ledger_drop();
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	return CUDA_SUCCESS;
}

void memory_forget_after_fork(void)
{
	memset(blocks, 0, sizeof blocks);
	memset(has_context, 0, sizeof has_context);
	virtual_forget_after_fork();
	pthread_mutex_init(&table, NULL);
}
