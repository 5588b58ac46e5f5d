/* cudaIpcGetMemHandle for memory that we back. CUDA creates no handle for it, so we create one, which names the server
 * (ipc_server.c) that provides a descriptor of the physical memory.
 *
 * Invariant: exported memory counts as exported in the mailbox until it is freed, and is offered under one number for so long,
 * whatever physical memory it has. While it is away nothing is offered; it is offloaded only where what is shared moves
 * (sharing/). For a block that cannot be exported CUDA is called.
 */
#define _GNU_SOURCE
#include "ipc.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ipc_server.h"
#include "sharing/sharing.h"
#include "memory.h"
#include "stripes.h"

static bool export(const struct driver *cuda, struct block *block)
{
	int descriptor = -1;

	if (block->physical || block->away ||
	    cuda->cuMemExportToShareableHandle(&descriptor, block->handle, POSIX_DESCRIPTOR, 0))
		return false;
	fcntl(descriptor, F_SETFD, FD_CLOEXEC);
	block->exported = ipc_server_offer(descriptor);
	if (!block->exported) {
		close(descriptor);
		return false;
	}
	if (!sharing_moves())
		block->unusual = true;
	block_changed(block);
	ipc_count(&snapshim_mailbox.ipc_exports, 1);
	return true;
}

/* Called with the lock, so that neither the block nor the server can go away. */
static bool write_handle(const struct driver *cuda, struct block *block, void *handle)
{
	struct ipc_handle made = {.unused = {0}};

	if (block->freed || (!block->exported && !export(cuda, block)))
		return false;
	memcpy(made.mark, IPC_MARK, sizeof(made.mark));
	made.server = ipc_server_open();
	made.number = block->exported;
	made.bytes = block->bytes;
	memcpy(handle, &made, sizeof(made));
	return made.server != 0;
}

bool memory_ipc_get(void *handle, uint64_t address)
{
	const struct driver *cuda = driver();
	struct block *block;
	bool done;

	if (!handle || !called_by_program() || !cuda || !cuda->cuMemExportToShareableHandle)
		return false;
	memory_enter();
	blocks_lock();
	block = block_with(address);
	done = block && write_handle(cuda, block, handle);
	blocks_unlock();
	memory_leave();
	return done;
}

/* The memory behind the block is another one from now on, which `descriptor` names; -1: there is none, or it is not known. */
void ipc_offer(const struct block *block, int descriptor)
{
	if (!block->exported)
		return;
	ipc_server_replace(block->exported, descriptor);
	if (descriptor < 0)
		ipc_must_open(SNAPSHIM_IPC_NOT_OFFERED);
}

/* Memory that was taken back has kept the descriptor that it came with: imported memory cannot be exported. */
int ipc_offer_all(struct worker *worker)
{
	for (size_t i = 0; i < blocks_count(); i++) {
		struct block *block = block_at(i);
		int descriptor, answer;

		if (!block->exported || ipc_server_has(block->exported))
			continue;
		driver()->cuCtxSetCurrent(block->context); /* it may have ended: none is needed */
		answer = physical_export(block, &descriptor);
		if (answer)
			return worker_fails(worker, EIO, "cuMemExportToShareableHandle answers", answer);
		KERNEL(SYS_fcntl, descriptor, F_SETFD, FD_CLOEXEC);
		ipc_server_replace(block->exported, descriptor);
	}
	return 0;
}

void ipc_withdraw(struct block *block)
{
	if (!block->exported)
		return;
	ipc_server_withdraw(block->exported);
	block->exported = 0;
	ipc_count(&snapshim_mailbox.ipc_exports, -1);
}
