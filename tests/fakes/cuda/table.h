/* Tables of fixed size, whose slots are reused. */
#ifndef FAKE_CUDA_TABLE_H
#define FAKE_CUDA_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#define GRAIN_BYTES (2ULL << 20) /* the driver's granularity */

/* A free slot of a table; NULL: it is full. `used` is a member that is 0 in free slots. */
#define FREE_PLACE(table, count, used, room)                        \
	({                                                          \
		int place_ = 0;                                     \
		while (place_ < (count) && (table)[place_].used)    \
			place_++;                                   \
		if (place_ == (count) && (count) < (room))          \
			(count)++;                                  \
		place_ < (room) ? &(table)[place_] : NULL;          \
	})

static inline bool whole_grains(uint64_t number)
{
	return number % GRAIN_BYTES == 0;
}

#endif
