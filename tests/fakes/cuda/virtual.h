/* Device memory of the virtual-memory calls: addresses, and the physical memory (physical.h) that is mapped there. */
#ifndef FAKE_CUDA_VIRTUAL_H
#define FAKE_CUDA_VIRTUAL_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"

/* For a program's threads, between process_enter and process_leave. */
CUresult virtual_reserve(CUdeviceptr *address, uint64_t bytes, uint64_t alignment, CUdeviceptr wanted);
CUresult virtual_unreserve(CUdeviceptr address, uint64_t bytes);
CUresult virtual_retain(CUmemGenericAllocationHandle *handle, CUdeviceptr address);
CUresult virtual_map(CUdeviceptr address, uint64_t bytes, uint64_t offset, CUmemGenericAllocationHandle handle);
CUresult virtual_unmap(CUdeviceptr address, uint64_t bytes);
CUresult virtual_set_access(CUdeviceptr address, uint64_t bytes, int gpu, int flags);
CUresult virtual_get_access(CUdeviceptr address, int gpu, unsigned long long *flags);
/* The mapping that contains an address, and its GPU; false: none. */
bool virtual_range(CUdeviceptr address, CUdeviceptr *base, uint64_t *bytes, CUmemAllocationProp *prop);

/* For memory.c, which holds the table's lock, or runs in a driver thread while no thread is inside the gate. */
CUdeviceptr virtual_taken_until(CUdeviceptr address, uint64_t bytes); /* a reservation's end, 0: nothing is reserved there */
bool virtual_accessible(CUdeviceptr address, uint64_t bytes, int flags);
bool virtual_to_host(void); /* false: there was no room, nothing has changed */
bool virtual_to_devices(void); /* false: not all is back; may be repeated */
void virtual_forget_after_fork(void);

#endif
