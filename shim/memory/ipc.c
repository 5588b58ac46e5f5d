/* cudaIpcGetMemHandle and its kin for memory that we back. CUDA makes no such handle of it, so we do: one that says where a
 * descriptor of the physical memory can be had (desk.c). Whoever opens it maps that memory, in the order CUDA's own calls keep.
 *
 * Invariant: what is exported is not parked; it stays until it is freed, and the counts say that it is there. A handle that
 * is not ours, and any block that cannot be exported, is CUDA's own business.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "desk.h"
#include "memory.h"

#define INVALID_CONTEXT 201 /* also cudaErrorDeviceUninitialized: what opening one's own handle gets */
#define MAP_FAILS 205	    /* also cudaErrorMapBufferObjectFailed: the exporter is gone, or has freed it */

static const char mark[16] = "snapshim-memory";

struct ticket { /* in the place of cudaIpcMemHandle_t */
	char mark[16];
	uint64_t desk, number, bytes;
	uint64_t nothing[3];
};
_Static_assert(sizeof(struct ticket) == 64, "CUDA's handles have 64 bytes");

/* Memory of another process that is open here. Records are used again. */
struct opened {
	uint64_t desk, number;
	uint64_t address, bytes;
	uint32_t times; /* 0: free */
	struct opened *next;
};

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static struct opened *opened;

/* ---------------------------------------------------------------- exporting */

static bool export(const struct driver *cuda, struct block *block, uint64_t desk)
{
	int descriptor = -1;

	if (block->physical || block->freed || block->away || !desk ||
	    cuda->cuMemExportToShareableHandle(&descriptor, block->handle, POSIX_DESCRIPTOR, 0))
		return false;
	fcntl(descriptor, F_SETFD, FD_CLOEXEC);
	block->exported = desk_offer(descriptor);
	if (!block->exported) {
		close(descriptor);
		return false;
	}
	block->unusual = true;
	block_changed(block);
	__atomic_add_fetch(&snapshim_mailbox.ipc_exports, 1, __ATOMIC_RELAXED);
	return true;
}

bool memory_ipc_get(void *handle, uint64_t address)
{
	struct ticket ticket = {.nothing = {0}};
	const struct driver *cuda = driver();
	struct block *block;
	bool done;

	if (!handle || !backing_wanted() || !cuda || !cuda->cuMemExportToShareableHandle || !memory_is_ours(address))
		return false;
	ticket.desk = desk_open();
	memory_enter();
	blocks_lock();
	block = block_with(address);
	done = block && (block->exported || export(cuda, block, ticket.desk));
	if (done) {
		memcpy(ticket.mark, mark, sizeof(mark));
		ticket.number = block->exported;
		ticket.bytes = block->bytes;
		memcpy(handle, &ticket, sizeof(ticket));
	}
	blocks_unlock();
	memory_leave();
	if (!done)
		desk_withdraw(0);
	return done;
}

void ipc_withdraw(struct block *block)
{
	if (!block->exported)
		return;
	desk_withdraw(block->exported);
	block->exported = 0;
	__atomic_sub_fetch(&snapshim_mailbox.ipc_exports, 1, __ATOMIC_RELAXED);
}

/* ---------------------------------------------------------------- opening */

static int map(const struct driver *cuda, int descriptor, struct opened *record)
{
	struct cuda_access access = {{ON_DEVICE, 0}, READ_AND_WRITE};
	uint64_t handle;
	int status = cuda->cuCtxGetDevice(&access.location.id);

	if (!status)
		status = cuda->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)descriptor, POSIX_DESCRIPTOR);
	if (status)
		return status;
	status = cuda->cuMemAddressReserve(&record->address, record->bytes, 0, 0, 0);
	if (!status) {
		status = cuda->cuMemMap(record->address, record->bytes, 0, handle, 0);
		if (!status) {
			status = cuda->cuMemSetAccess(record->address, record->bytes, &access, 1);
			if (status)
				cuda->cuMemUnmap(record->address, record->bytes);
		}
		if (status)
			cuda->cuMemAddressFree(record->address, record->bytes);
	}
	cuda->cuMemRelease(handle); /* the mapping keeps it */
	return status;
}

static struct opened *free_record(void)
{
	struct opened *record = opened;

	while (record && record->times)
		record = record->next;
	if (record)
		return record;
	record = calloc(1, sizeof(*record));
	if (record) {
		record->next = opened;
		opened = record;
	}
	return record;
}

static int open_first(const struct driver *cuda, const struct ticket *ticket, struct opened *record)
{
	int descriptor = desk_ask(ticket->desk, ticket->number), status;

	if (descriptor < 0)
		return MAP_FAILS;
	record->desk = ticket->desk;
	record->number = ticket->number;
	record->bytes = ticket->bytes;
	memory_enter();
	status = map(cuda, descriptor, record);
	memory_leave();
	close(descriptor);
	return status;
}

static struct opened *find_opened(const struct ticket *ticket)
{
	for (struct opened *record = opened; record; record = record->next)
		if (record->times && record->desk == ticket->desk && record->number == ticket->number)
			return record;
	return NULL;
}

bool memory_ipc_open(uint64_t *address, const void *handle, int *status)
{
	const struct driver *cuda = driver();
	struct opened *record;
	struct ticket ticket;

	memcpy(&ticket, handle, sizeof(ticket));
	if (memcmp(ticket.mark, mark, sizeof(mark)) != 0)
		return false;
	*status = INVALID_CONTEXT;
	if (!address || !cuda || !cuda->cuMemImportFromShareableHandle || ticket.desk == desk_number())
		return true;
	pthread_mutex_lock(&opening);
	record = find_opened(&ticket);
	if (record) {
		*status = 0;
	} else {
		record = free_record();
		*status = record ? open_first(cuda, &ticket, record) : CUDA_OUT_OF_MEMORY;
	}
	if (*status == 0) {
		record->times++;
		*address = record->address;
		__atomic_add_fetch(&snapshim_mailbox.ipc_imports, 1, __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&opening);
	return true;
}

/* What was launched and may use it has ended, unless something is captured: to wait would end that, and the memory stays. */
static int unmap(const struct driver *cuda, struct opened *record)
{
	int status;

	if (captures_under_way())
		return 0;
	status = cuda->cuCtxSynchronize();
	if (!status)
		status = cuda->cuMemUnmap(record->address, record->bytes);
	if (!status)
		status = cuda->cuMemAddressFree(record->address, record->bytes);
	return status;
}

bool memory_ipc_close(uint64_t address, int *status)
{
	const struct driver *cuda = driver();
	struct opened *record;

	if (!cuda)
		return false;
	pthread_mutex_lock(&opening);
	for (record = opened; record; record = record->next)
		if (record->times && record->address == address)
			break;
	*status = 0;
	if (record && record->times == 1) {
		memory_enter();
		*status = unmap(cuda, record);
		memory_leave();
	}
	if (record && !*status) {
		record->times--;
		__atomic_sub_fetch(&snapshim_mailbox.ipc_imports, 1, __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&opening);
	return record != NULL;
}

/* In a forked child. */
void ipc_forget(void)
{
	desk_forget();
	opened = NULL;
	opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
