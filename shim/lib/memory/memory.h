/* What the files that back device memory know of one another. */
#ifndef SNAPSHIM_MEMORY_MEMORY_H
#define SNAPSHIM_MEMORY_MEMORY_H

#include "core/shim.h"
#include "blocks.h"
#include "driver.h"

/* backing.c: all false where the real function has to answer. */
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
bool called_by_program(void); /* not from inside a call that was passed on, which is CUDA's own business */
/* Makes the device of the runtime that the caller uses current in the driver, as its own first call in this thread would. */
bool enter_runtime_device(const void *caller);

/* physical.c: the physical memory of a block. Answers are the driver's. */
struct cuda_property property_on(int device);
int physical_attach(struct block *block); /* fails: it is away, as before */
int physical_detach(struct block *block); /* it is away, unless the driver refused */

/* peers.c: under the lock. Whoever may use a device's memory may use this block. */
int peers_admit(struct block *block);
void peers_meet(int device, int owner); /* the first allocation on `device`, where `owner` has memory that is backed */
bool peers_unasked(int device, int owner); /* whether it may lack that access */
void peers_forget(void);

/* ipc_export.c: the block is freed, and no process can open it any more. */
void ipc_withdraw(struct block *block);
/* ipc_import.c */
void ipc_forget(void);

/* contexts.c: between both calls a context ends: a device's primary one, or (device -1) this one. No copy is made in it
 * after. */
void context_ends(int device, const void *context);
void context_has_ended(void);

#endif
