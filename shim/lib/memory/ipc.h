/* Our handles that replace CUDA's IPC handles, see ipc_export.c and ipc_import.c. */
#ifndef SNAPSHIM_MEMORY_IPC_H
#define SNAPSHIM_MEMORY_IPC_H

#include <stdint.h>

#include "abi.h"

#define IPC_MARK "snapshim-memory"

struct ipc_handle { /* replaces cudaIpcMemHandle_t */
	char mark[16];
	uint64_t server, number; /* of the exporting process's server (ipc_server.h), and of the block there */
	uint64_t bytes;
	uint64_t unused[3];
};
_Static_assert(sizeof(struct ipc_handle) == 64, "CUDA's handles have 64 bytes");
_Static_assert(sizeof(IPC_MARK) == sizeof(((struct ipc_handle *)0)->mark), "the mark fills its field");

static inline void ipc_must_open(uint32_t what)
{
	__atomic_or_fetch(&snapshim_mailbox.ipc_closed, what, __ATOMIC_SEQ_CST);
}

static inline void ipc_is_open(uint32_t what)
{
	__atomic_and_fetch(&snapshim_mailbox.ipc_closed, ~what, __ATOMIC_SEQ_CST);
}

static inline void ipc_count(uint64_t *counter, int change)
{
	__atomic_add_fetch(counter, (uint64_t)change, __ATOMIC_RELAXED);
}

#endif
