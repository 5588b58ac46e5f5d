/* Keeps the blocks sorted by address in one reserved range of memory, so that no allocator is needed while the job is
 * parked.
 *
 * Invariant: while memory_calls_open() is 0 the lock is free, and every block is either `away`, or mapped and accessible as
 * recorded.
 */
#define _GNU_SOURCE
#include "blocks.h"

#include <string.h>
#include <sys/mman.h>

#include "core/shim.h"

#define BLOCKS_MAX (1 << 18)		       /* 512 GiB in the smallest pieces */
#define OUR_HANDLE 0x534e415000000000ULL /* "SNAP": the driver's are small numbers or addresses */

static struct block *blocks;
static size_t count;
static struct physical *physicals; /* the first is not used */
static uint32_t physicals_used = 1, first_free;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void blocks_lock(void)
{
	pthread_mutex_lock(&mutex);
}

bool blocks_lock_until(int64_t until_ns)
{
	while (pthread_mutex_trylock(&mutex) != 0) {
		if (now_ns() >= until_ns)
			return false;
		pause_us(100);
	}
	return true;
}

void blocks_unlock(void)
{
	pthread_mutex_unlock(&mutex);
}

static void *reserve(size_t bytes)
{
	void *place = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return place == MAP_FAILED ? NULL : place;
}

size_t blocks_count(void)
{
	return count;
}

struct block *block_at(size_t index)
{
	return &blocks[index];
}

size_t blocks_from(uint64_t address)
{
	size_t low = 0, high = count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (blocks[middle].address + blocks[middle].bytes <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

struct block *block_with(uint64_t address)
{
	size_t at = blocks_from(address);

	return at < count && blocks[at].address <= address ? &blocks[at] : NULL;
}

/* Whether OFFLOAD and FILL can restore the block. Physical memory that is mapped in pieces or twice has content that no
 * single block covers. */
static bool can_be_offloaded(const struct block *block)
{
	const struct physical *physical = &physicals[block->physical];

	if (block->unusual || block->freed || !(block->access >> block->device & 1))
		return false;
	return !block->physical || (!physical->shared && physical->mappings == 1 && physical->bytes == block->bytes);
}

static void count_in(struct block *block, bool wanted)
{
	if (wanted != block->counted) {
		__atomic_add_fetch(&snapshim_mailbox.device_bytes, wanted ? block->bytes : -block->bytes, __ATOMIC_RELAXED);
		__atomic_add_fetch(&snapshim_mailbox.device_blocks, wanted ? 1 : (uint64_t)-1, __ATOMIC_RELAXED);
		block->counted = wanted;
	}
}

static void count_lent(struct block *block, bool lent)
{
	if (lent != block->lent)
		__atomic_add_fetch(&snapshim_mailbox.ipc_exports_that_move, lent ? 1 : (uint64_t)-1, __ATOMIC_RELAXED);
	block->lent = lent;
}

void block_changed(struct block *block)
{
	count_in(block, can_be_offloaded(block));
	count_lent(block, block->counted && block->exported);
}

void block_is_imported(struct block *block, bool imported)
{
	if (block->imported != imported)
		__atomic_add_fetch(&snapshim_mailbox.device_imported, imported ? 1 : (uint64_t)-1, __ATOMIC_RELAXED);
	block->imported = imported;
}

bool block_add(const struct block *block)
{
	size_t at = blocks_from(block->address);

	if (!blocks)
		blocks = reserve(BLOCKS_MAX * sizeof(*blocks));
	if (!physicals)
		physicals = reserve(BLOCKS_MAX * sizeof(*physicals));
	if (!blocks || !physicals || count == BLOCKS_MAX)
		return false;
	memmove(&blocks[at + 1], &blocks[at], (count - at) * sizeof(*blocks));
	blocks[at] = *block;
	blocks[at].counted = blocks[at].lent = false;
	count++;
	block_changed(&blocks[at]);
	return true;
}

void block_remove(struct block *block)
{
	size_t at = (size_t)(block - blocks);

	count_in(block, false);
	count_lent(block, false);
	memmove(&blocks[at], &blocks[at + 1], (count - at - 1) * sizeof(*blocks));
	count--;
}

uint64_t physical_add(const struct physical *physical)
{
	uint32_t number = first_free;

	if (!physicals)
		physicals = reserve(BLOCKS_MAX * sizeof(*physicals));
	if (!physicals || (!number && physicals_used == BLOCKS_MAX))
		return 0;
	if (number)
		first_free = physicals[number].next_free;
	else
		number = physicals_used++;
	physicals[number] = *physical;
	return OUR_HANDLE | number;
}

uint32_t physical_number(uint64_t handle)
{
	uint32_t number = (uint32_t)handle;

	return (handle & ~(uint64_t)UINT32_MAX) == OUR_HANDLE && number && number < physicals_used ? number : 0;
}

struct physical *physical_numbered(uint32_t number)
{
	return &physicals[number];
}

/* A handle that the program released is not valid any more. */
struct physical *physical_of(uint64_t handle)
{
	uint32_t number = physical_number(handle);

	return number && physicals[number].held ? &physicals[number] : NULL;
}

void physical_drop_unused(uint32_t number)
{
	struct physical *physical = &physicals[number];

	if (physical->held || physical->mappings)
		return;
	*physical = (struct physical){.next_free = first_free};
	first_free = number;
}

/* In a forked child: the GPU's memory is its parent's. */
void blocks_forget(void)
{
	pthread_mutex_init(&mutex, NULL);
	count = 0;
	physicals_used = 1;
	first_free = 0;
	snapshim_mailbox.device_bytes = 0;
	snapshim_mailbox.device_blocks = 0;
}
