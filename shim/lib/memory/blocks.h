/* The table of the device memory that the shim backs. */
#ifndef SNAPSHIM_MEMORY_BLOCKS_H
#define SNAPSHIM_MEMORY_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver.h"

#define DEVICES_MAX 64 /* bits of a block's `access` */

/* One mapping of physical memory at an address that never changes. */
struct block {
	uint64_t address, bytes;
	uint64_t handle;   /* of its physical memory, where that is the block's own (physical == 0) */
	uint64_t access;   /* the devices that may read and write it, by bit */
	void *context;    /* in which it was created */
	uint64_t exported; /* the number under which other processes get it (ipc_server.h); 0: it is not exported */
	uint32_t physical; /* the number of physical memory that the program created and mapped itself; 0: allocated by us */
	int32_t device;
	int32_t leaving; /* the thread that is unmapping it */
	bool unusual; /* exported, multicast, mapped in part …: stays with the driver's checkpoint */
	bool counted; /* in the mailbox's counts: OFFLOAD copies it */
	bool lent; /* in the mailbox's count of exports that move */
	bool striped; /* its content is part of the stripes of the current or last OFFLOAD */
	bool away; /* it has no physical memory */
	bool freed; /* by the program, during a capture: to be released after it */
	bool imported; /* its memory was created by another process: it cannot be exported, and the driver restores no process with it */
};

/* Physical memory that the program creates itself (torch's expandable segments). The program holds our handle, we hold the
 * driver's. */
struct physical {
	uint64_t handle, bytes;
	unsigned long long flags;
	struct cuda_property property;
	uint32_t mappings, next_free;
	bool held; /* the program has not released it */
	bool shared; /* other code has the driver's own handle */
};

void blocks_lock(void);
bool blocks_lock_until(int64_t until_ns); /* a thread that is parked may hold it */
void blocks_unlock(void);

/* To be called with the lock, or while no thread is in the wrappers. Blocks are in the order of their addresses. */
size_t blocks_count(void);
struct block *block_at(size_t index);
struct block *block_with(uint64_t address); /* NULL: not ours */
size_t blocks_from(uint64_t address); /* the first that ends behind it */
bool block_add(const struct block *block);
void block_remove(struct block *block);
void block_changed(struct block *block); /* updates the mailbox's counts */
/* Likewise: as long as one is, the driver cannot restore the process. */
void block_is_imported(struct block *block, bool imported);

uint64_t physical_add(const struct physical *physical); /* the program's handle; 0: no room */
struct physical *physical_of(uint64_t handle); /* NULL: not ours */
struct physical *physical_numbered(uint32_t number);
uint32_t physical_number(uint64_t handle);
void physical_drop_unused(uint32_t number);

void blocks_forget(void);

#endif
