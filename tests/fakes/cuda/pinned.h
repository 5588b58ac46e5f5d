/* Host memory that the GPU can reach, which asynchronous copies need. */
#ifndef FAKE_CUDA_PINNED_H
#define FAKE_CUDA_PINNED_H

#include <stdbool.h>
#include <stdint.h>

bool pinned_contains(const void *address, uint64_t bytes);

#endif
