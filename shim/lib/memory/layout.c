/* The layout of the offloaded memory in the stripe files.
 *
 * The striped blocks, in the order of their addresses, are cut into chunks of at most a slot. Chunk c is in stripe c %
 * count, after the chunks that are there already. So every worker can compute its own chunks, and a reader of the files
 * needs to know nothing.
 */
#include "stripes.h"

struct stripes stripes;

bool next_chunk(struct cursor *cursor, struct chunk *chunk)
{
	for (; cursor->block < blocks_count(); cursor->block++, cursor->chunk = 0) {
		const struct block *block = block_at(cursor->block);
		uint64_t chunks = block->striped ? (block->bytes + stripes.slot_bytes - 1) / stripes.slot_bytes : 0;
		uint64_t from, left;

		if (chunks - cursor->chunk <= cursor->skip) {
			cursor->skip -= chunks - cursor->chunk;
			continue;
		}
		cursor->chunk += cursor->skip;
		from = cursor->chunk * stripes.slot_bytes;
		left = block->bytes - from;
		*chunk = (struct chunk){block->address + from, left < stripes.slot_bytes ? left : stripes.slot_bytes,
					block->device};
		cursor->chunk++;
		cursor->skip = stripes.count - 1;
		return true;
	}
	return false;
}

uint64_t stripe_bytes(unsigned int stripe)
{
	struct cursor cursor = {.skip = stripe};
	struct chunk chunk;
	uint64_t bytes = 0;

	while (next_chunk(&cursor, &chunk))
		bytes += chunk.bytes;
	return bytes;
}
