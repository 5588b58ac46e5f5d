/* cudaIpcGetMemHandle and its kin for memory that we back. CUDA makes no such handle of it, so we do: one that says where a
 * descriptor of the physical memory can be had (desk.c). Whoever opens it maps that memory.
 *
 * Invariant: what is exported is not parked; it stays until it is freed, and the counts say that it is there. A handle that
 * is not ours, and any block that cannot be exported, is CUDA's own business.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc_server.h"
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

/* Memory of another process that is mapped here. Records are used again. */
struct opened {
	uint64_t desk, number;
	uint64_t address, bytes; /* address 0: the record is free */
	uint64_t access;	 /* the devices that may use it, by bit */
	void *context;		 /* it was opened in */
	uint32_t times;		 /* 0: closed while something was captured, to be unmapped later */
	struct opened *next;
};

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static struct opened *opened;

static void count(uint64_t *counter, int change)
{
	__atomic_add_fetch(counter, (uint64_t)change, __ATOMIC_RELAXED);
}

/* ---------------------------------------------------------------- exporting */

static bool export(const struct driver *cuda, struct block *block)
{
	int descriptor = -1;

	if (block->physical || block->away ||
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
	count(&snapshim_mailbox.ipc_exports, 1);
	return true;
}

/* Under the lock, so that the block stays, and with it the desk. */
static bool write_ticket(const struct driver *cuda, struct block *block, void *handle)
{
	struct ticket ticket = {.nothing = {0}};

	if (block->freed || (!block->exported && !export(cuda, block)))
		return false;
	memcpy(ticket.mark, mark, sizeof(mark));
	ticket.desk = desk_open();
	ticket.number = block->exported;
	ticket.bytes = block->bytes;
	memcpy(handle, &ticket, sizeof(ticket));
	return ticket.desk != 0;
}

bool memory_ipc_get(void *handle, uint64_t address)
{
	const struct driver *cuda = driver();
	struct block *block;
	bool done;

	if (!handle || !backing_wanted() || !cuda || !cuda->cuMemExportToShareableHandle)
		return false;
	memory_enter();
	blocks_lock();
	block = block_with(address);
	done = block && write_ticket(cuda, block, handle);
	blocks_unlock();
	memory_leave();
	return done;
}

void ipc_withdraw(struct block *block)
{
	if (!block->exported)
		return;
	desk_withdraw(block->exported);
	block->exported = 0;
	count(&snapshim_mailbox.ipc_exports, -1);
}

/* ---------------------------------------------------------------- opening */

static int allow_device(const struct driver *cuda, struct opened *record, int device)
{
	struct cuda_access access = {{ON_DEVICE, device}, READ_AND_WRITE};
	int status = cuda->cuMemSetAccess(record->address, record->bytes, &access, 1);

	if (!status && device < DEVICES_MAX)
		record->access |= (uint64_t)1 << device;
	return status;
}

/* For the device that is current, and for those that may be allowed to use its memory, as far as they can. */
static int allow(const struct driver *cuda, struct opened *record)
{
	int current, can, status = cuda->cuCtxGetDevice(&current);

	if (status || (current < DEVICES_MAX && record->access >> current & 1))
		return status;
	status = allow_device(cuda, record, current);
	for (int device = 0; !status && device < DEVICES_MAX && cuda->cuDeviceCanAccessPeer; device++) {
		if (cuda->cuDeviceCanAccessPeer(&can, device, current))
			break; /* there are no more */
		if (device != current && can)
			allow_device(cuda, record, device);
	}
	return status;
}

static int map(const struct driver *cuda, int descriptor, struct opened *record)
{
	uint64_t handle;
	int status = cuda->cuCtxGetCurrent(&record->context);

	if (!status)
		status = cuda->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)descriptor, POSIX_DESCRIPTOR);
	if (status)
		return status;
	status = cuda->cuMemAddressReserve(&record->address, record->bytes, 0, 0, 0);
	if (!status) {
		status = cuda->cuMemMap(record->address, record->bytes, 0, handle, 0);
		if (!status) {
			status = allow(cuda, record);
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

	while (record && record->address)
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

static int open_first(const struct driver *cuda, const struct ticket *ticket)
{
	struct opened *record = free_record();
	struct opened fresh = {.desk = ticket->desk, .number = ticket->number, .bytes = ticket->bytes};
	int descriptor, status = MAP_FAILS;

	if (!record)
		return CUDA_OUT_OF_MEMORY;
	count(&snapshim_mailbox.ipc_imports, 1); /* before it begins: who is parked in the middle has opened it */
	descriptor = desk_ask(ticket->desk, ticket->number);
	if (descriptor >= 0) {
		memory_enter();
		status = map(cuda, descriptor, &fresh);
		memory_leave();
		close(descriptor);
	}
	if (!status) {
		fresh.next = record->next;
		*record = fresh;
	} else {
		count(&snapshim_mailbox.ipc_imports, -1);
	}
	return status;
}

static struct opened *find_opened(const struct ticket *ticket)
{
	for (struct opened *record = opened; record; record = record->next)
		if (record->address && record->desk == ticket->desk && record->number == ticket->number)
			return record;
	return NULL;
}

/* What was launched in the context where it was opened, and may use it, has ended; unless that context itself has. */
static int unmap(const struct driver *cuda, struct opened *record)
{
	void *current = NULL;
	int status = cuda->cuCtxGetCurrent(&current);

	if (!status && cuda->cuCtxSetCurrent(record->context) == 0) {
		status = cuda->cuCtxSynchronize();
		cuda->cuCtxSetCurrent(current);
	}
	if (!status)
		status = cuda->cuMemUnmap(record->address, record->bytes);
	if (status)
		return status;
	cuda->cuMemAddressFree(record->address, record->bytes);
	record->address = 0;
	count(&snapshim_mailbox.ipc_imports, -1);
	return 0;
}

/* To wait for the device would end a capture; so what is closed during one stays until there is none. */
static int unmap_closed(const struct driver *cuda)
{
	int status = 0;

	if (captures_under_way())
		return 0;
	memory_enter();
	for (struct opened *record = opened; record; record = record->next)
		if (record->address && !record->times && !status)
			status = unmap(cuda, record);
	memory_leave();
	return status;
}

bool memory_ipc_open(uint64_t *address, const void *handle, const void *caller, int *status)
{
	const struct driver *cuda;
	struct opened *record;
	struct ticket ticket;

	memcpy(&ticket, handle, sizeof(ticket));
	if (memcmp(ticket.mark, mark, sizeof(mark)) != 0)
		return false;
	*status = INVALID_CONTEXT;
	if ((caller && !enter_runtime_device(caller)) || !(cuda = driver()) || !cuda->cuMemImportFromShareableHandle ||
	    !address || ticket.desk == desk_number())
		return true;
	pthread_mutex_lock(&opening);
	record = find_opened(&ticket);
	if (record) {
		*status = allow(cuda, record);
		if (!*status && record->times)
			count(&snapshim_mailbox.ipc_imports, 1);
	} else {
		unmap_closed(cuda);
		*status = open_first(cuda, &ticket);
		record = find_opened(&ticket);
	}
	if (!*status) {
		record->times++;
		*address = record->address;
	}
	pthread_mutex_unlock(&opening);
	return true;
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
	if (record && --record->times) {
		count(&snapshim_mailbox.ipc_imports, -1);
	} else if (record) {
		*status = unmap_closed(cuda);
		record->times = *status && record->address; /* it can be closed again */
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
