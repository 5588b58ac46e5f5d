/* Device memory by the virtual-memory calls: addresses, physical memory, and what is mapped where.
 *
 * Physical memory has no address of its own and lives until it is released as often as it was created or retained, and is
 * mapped nowhere.
 */
#ifndef FAKE_CUDA_VIRTUAL_H
#define FAKE_CUDA_VIRTUAL_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "node.h"

#define GRAIN_BYTES (2ULL << 20) /* as the driver hands out */

/* For a program's threads, between process_enter and process_leave. */
CUresult virtual_reserve(CUdeviceptr *address, uint64_t bytes, uint64_t alignment, CUdeviceptr wanted);
CUresult virtual_unreserve(CUdeviceptr address, uint64_t bytes);
CUresult virtual_create(CUmemGenericAllocationHandle *handle, uint64_t bytes, const CUmemAllocationProp *prop);
CUresult virtual_release(CUmemGenericAllocationHandle handle);
CUresult virtual_retain(CUmemGenericAllocationHandle *handle, CUdeviceptr address);
CUresult virtual_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle);
CUresult virtual_map(CUdeviceptr address, uint64_t bytes, uint64_t offset, CUmemGenericAllocationHandle handle);
CUresult virtual_unmap(CUdeviceptr address, uint64_t bytes);
CUresult virtual_set_access(CUdeviceptr address, uint64_t bytes, int gpu, int flags);
CUresult virtual_get_access(CUdeviceptr address, int gpu, unsigned long long *flags);
/* The mapping an address is in, and its GPU; false: it is in none. */
bool virtual_range(CUdeviceptr address, CUdeviceptr *base, uint64_t *bytes, CUmemAllocationProp *prop);

/* For memory.c, which holds the table's lock, or is a driver thread while nobody is past the gate. */
void virtual_add_held(uint64_t bytes[MAX_GPUS]);
CUdeviceptr virtual_taken_until(CUdeviceptr address, uint64_t bytes); /* a reservation's end, 0: nothing is reserved there */
bool virtual_accessible(CUdeviceptr address, uint64_t bytes, int flags);
bool virtual_to_host(void);    /* false: there was no room, nothing has changed */
bool virtual_to_devices(void); /* false: not all is back; may be repeated */
void virtual_forget_after_fork(void);

#endif
