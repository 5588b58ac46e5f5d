/* Device memory: mappings that go away at a checkpoint and come back at the same address. */
#ifndef FAKE_CUDA_MEMORY_H
#define FAKE_CUDA_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "node.h"

/* For a program's threads, between process_enter and process_leave. */
CUresult memory_add_context(int gpu); /* counts a context's own memory, once per GPU */
CUresult memory_allocate(int gpu, uint64_t bytes, CUdeviceptr *address);
CUresult memory_allocate_managed(uint64_t bytes, CUdeviceptr *address);
CUresult memory_free(CUdeviceptr address);
bool memory_contains(CUdeviceptr address, uint64_t bytes);
CUresult memory_room(int gpu, uint64_t *free_bytes, uint64_t *total_bytes);

/* For the driver's threads, while nobody is past the gate. */
bool memory_has_managed(void);
CUresult memory_to_host(unsigned int delay_ms);
CUresult memory_to_devices(const struct node *node, unsigned int delay_ms);
void memory_forget_after_fork(void);

#endif
