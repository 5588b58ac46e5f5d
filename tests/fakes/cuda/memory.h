/* Device memory: mappings that are removed at a checkpoint and restored at the same address. */
#ifndef FAKE_CUDA_MEMORY_H
#define FAKE_CUDA_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "node.h"

/* For a program's threads, between process_enter and process_leave. */
CUresult memory_add_context(int gpu); /* counts a context's own memory, once per GPU */
CUresult memory_drop_context(int gpu); /* with all memory on that GPU, except that of virtual.c */
CUresult memory_allocate(int gpu, uint64_t bytes, CUdeviceptr *address);
CUresult memory_allocate_managed(uint64_t bytes, CUdeviceptr *address);
CUresult memory_free(CUdeviceptr address);
bool memory_can_read(CUdeviceptr address, uint64_t bytes);
bool memory_can_write(CUdeviceptr address, uint64_t bytes);
/* The allocation that contains an address, and its GPU (-1: managed); false: none, or one of virtual.c. */
bool memory_range(CUdeviceptr address, CUdeviceptr *base, uint64_t *bytes, int *gpu);
CUresult memory_room(int gpu, uint64_t *free_bytes, uint64_t *total_bytes);

/* For virtual.c: the lock of the tables, the update of the ledger, and a free address range (0: none). */
void memory_lock(void);
void memory_unlock(void);
CUresult memory_account(int gpu, uint64_t more);
CUdeviceptr memory_place(uint64_t bytes, uint64_t alignment, CUdeviceptr wanted);

/* For the driver's threads, while no thread is inside the gate. */
bool memory_has_managed(void);
CUresult memory_to_host(unsigned int delay_ms);
CUresult memory_to_devices(const struct node *node, unsigned int delay_ms);
void memory_forget_after_fork(void);

#endif
