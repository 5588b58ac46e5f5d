/* The internal interface between the files that back device memory. */
#ifndef SNAPSHIM_MEMORY_MEMORY_H
#define SNAPSHIM_MEMORY_MEMORY_H

#include "core/shim.h"
#include "blocks.h"
#include "driver.h"

/* backing.c: each returns false if the real function has to be called. */
bool backing_serves(const void *caller); /* called_by_program(), and by code whose memory we back */
bool backing_takes(size_t bytes);
bool backing_on(
	int device); /* for an allocation there, now: one device's memory is backed, until the program uses another's */
bool backing_allocate(uint64_t *address, size_t bytes);
bool backing_free(uint64_t address);
void backing_forget(void);
int backing_drop_freed(struct block *block); /* while the job is parked; the driver's answer */
void backing_drop(bool (*which)(const struct block *block, const void *argument), const void *argument);

/* runtime.c: PASS_ON calls the real function, which may itself call driver functions by names that are ours. */
#define PASS_ON(call)                 \
	({                            \
		int answer_;          \
                                      \
		memory_passes_on++;   \
		answer_ = (call);     \
		memory_passes_on--;   \
		answer_;              \
	})
extern _Thread_local unsigned int memory_passes_on __attribute__((tls_model("initial-exec")));
bool called_by_program(void); /* false inside a call that was passed on: calls from there are CUDA's own */
/* Makes the device of the caller's runtime current in the driver, as the runtime's first call in this thread would. */
bool enter_runtime_device(const void *caller);

/* physical.c: the physical memory of a block. Results are the driver's. */
struct cuda_property property_on(int device);
int physical_attach(struct block *block); /* on failure it stays away */
bool physical_is_exportable(const struct block *block); /* as far as can be told without asking the driver */
int physical_export(const struct block *block, int *descriptor);
int physical_import(struct block *block, int descriptor); /* maps that memory; on failure it stays away */
int physical_create(const struct block *block, uint64_t *handle); /* without mapping it */
/* Maps that memory instead of what the block has, which is kept until the new mapping stands. Takes the handle over. On
 * failure the block has what it had; if it is away, the driver refused that as well. */
int physical_replace(struct block *block, uint64_t handle);
int physical_detach(struct block *block); /* it is away, unless the driver refused */

/* peers.c: under the lock. Gives access to the block to all devices that may use its device's memory. */
int peers_admit(struct block *block);
bool peers_complete(const struct block *block); /* whether all devices that may use it can */
/* The first allocation on one of them, where the other has memory: lets `device` use that of `owner`. False: it cannot. */
bool peers_meet(int device, int owner);
bool peers_unasked(int device, int owner); /* whether it may lack that access */
void peers_forget(void);

/* ipc_export.c: the block is freed, so no process can open it any more. */
void ipc_withdraw(struct block *block);
/* Its physical memory was replaced, or released: what other processes get from now on (closed here), or -1. */
void ipc_offer(const struct block *block, int descriptor);
/* ipc_import.c */
void ipc_forget(void);

/* contexts.c: called before and after a context ends: a device's primary one, or (device -1) this one. No copy uses it
 * afterwards. */
void context_ends(int device, const void *context);
void context_has_ended(void);

#endif
