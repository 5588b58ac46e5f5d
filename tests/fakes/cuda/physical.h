/* Physical device memory, which has no address. It exists until it is released as often as it was created or retained,
 * and is not mapped. memory.c has the table's lock. */
#ifndef FAKE_CUDA_PHYSICAL_H
#define FAKE_CUDA_PHYSICAL_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "node.h"

struct physical {
	uint64_t bytes; /* 0: unused */
	uint32_t generation; /* of this slot of the table, so that a stale handle is invalid */
	uint32_t references;
	uint32_t mappings;
	bool imported; /* it belongs to the ledger entry of another process */
	CUmemAllocationProp prop;
	void *home; /* where its pages are; NULL while checkpointed */
	void *host; /* while checkpointed: the contents */
};

/* For a program's threads, between process_enter and process_leave; these take the lock. */
CUresult physical_create(CUmemGenericAllocationHandle *handle, uint64_t bytes, const CUmemAllocationProp *prop);
CUresult physical_release(CUmemGenericAllocationHandle handle);
CUresult physical_export(int *file, CUmemGenericAllocationHandle handle);
CUresult physical_import(CUmemGenericAllocationHandle *handle, int file);
CUresult physical_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle);

/* The caller must hold the lock. */
struct physical *physical_of(CUmemGenericAllocationHandle handle); /* NULL: invalid handle */
CUmemGenericAllocationHandle physical_handle(const struct physical *memory);
CUresult physical_drop_if_unused(struct physical *memory);
void physical_add_held(uint64_t bytes[MAX_GPUS]);

/* For the driver's threads, while no thread is inside the gate. */
bool physical_has_imported(void); /* the driver restores no process that has memory of another one */
bool physical_copy_to_host(void); /* false: there was no room, nothing has changed */
void physical_leave_devices(void);
bool physical_to_devices(void); /* false: not all is back; may be repeated */
void physical_forget_after_fork(void);

#endif
