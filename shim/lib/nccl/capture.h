/* Whether streams are being captured into CUDA graphs. */
#ifndef SNAPSHIM_NCCL_CAPTURE_H
#define SNAPSHIM_NCCL_CAPTURE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

extern _Atomic int captures; /* begun and not ended, on any stream */

static inline bool capture_under_way(void)
{
	return atomic_load_explicit(&captures, memory_order_relaxed) > 0;
}

/* Whether this stream is being captured now. */
bool capture_has(uint64_t stream);

#endif
