/* cudaIpcOpenMemHandle and cudaIpcCloseMemHandle for our handles (ipc_export.c): map the memory in this process.
 *
 * Invariant: the mailbox counts every open handle, and names the servers they are from. A handle that is not ours is passed to
 * CUDA.
 */
#define _GNU_SOURCE
#include "ipc.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc_opened.h"
#include "ipc_server.h"
#include "memory.h"
#include "sharing/sharing.h"

#define INVALID_CONTEXT 201 /* also cudaErrorDeviceUninitialized: the answer to a process that opens its own handle */
#define MAP_FAILS 205	    /* also cudaErrorMapBufferObjectFailed: the exporter has ended, or has freed the memory */

pthread_mutex_t ipc_opening = PTHREAD_MUTEX_INITIALIZER;
struct opened *ipc_opened;

static int allow_device(const struct driver *cuda, struct opened *record, int device)
{
	struct cuda_access access = {{ON_DEVICE, device}, READ_AND_WRITE};
	int status = cuda->cuMemSetAccess(record->address, record->bytes, &access, 1);

	if (!status && device < DEVICES_MAX)
		record->access |= (uint64_t)1 << device;
	return status;
}

/* Gives access to the current device, and to all other devices that can be given access. */
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
	struct opened *record = ipc_opened;

	while (record && record->address)
		record = record->next;
	if (record)
		return record;
	record = calloc(1, sizeof(*record));
	if (record) {
		record->next = ipc_opened;
		ipc_opened = record;
	}
	return record;
}

/* Returns false if the mailbox has no room for another server. */
static bool note_server(uint64_t from[SNAPSHIM_SERVERS_MAX], uint64_t server)
{
	for (int i = 0; i < SNAPSHIM_SERVERS_MAX; i++) {
		if (!from[i])
			from[i] = server;
		if (from[i] == server)
			return true;
	}
	return false;
}

/* The mailbox shows what is open, and where it is from: the daemon looks whether those processes move too. */
static void show(void)
{
	uint64_t from[SNAPSHIM_SERVERS_MAX] = {0}, moving = 0;

	if (!sharing_moves())
		return;
	for (struct opened *record = ipc_opened; record; record = record->next)
		if (record->address && note_server(from, record->server))
			moving += record->times ? record->times : 1;
	for (int i = 0; i < SNAPSHIM_SERVERS_MAX; i++)
		STORE(&snapshim_mailbox.ipc_opened_from[i], from[i]);
	STORE(&snapshim_mailbox.ipc_imports_that_move, moving);
}

void ipc_forget_opened(struct opened *record)
{
	record->address = 0;
	ipc_count(&snapshim_mailbox.ipc_imports, -1);
	show();
}

static int open_first(const struct driver *cuda, const struct ipc_handle *handle)
{
	struct opened *record = free_record();
	struct opened fresh = {.server = handle->server, .number = handle->number, .bytes = handle->bytes};
	int descriptor, status = MAP_FAILS;

	if (!record)
		return CUDA_OUT_OF_MEMORY;
	ipc_count(&snapshim_mailbox.ipc_imports,
		  1); /* before it begins: for a thread that is parked in the middle it counts as open */
	descriptor = ipc_server_ask(handle->server, handle->number, IPC_PATIENCE_S);
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
		ipc_count(&snapshim_mailbox.ipc_imports, -1);
	}
	return status;
}

static struct opened *find_opened(const struct ipc_handle *handle)
{
	for (struct opened *record = ipc_opened; record; record = record->next)
		if (record->address && record->server == handle->server && record->number == handle->number)
			return record;
	return NULL;
}

/* First waits for work in the context where it was opened, unless that context has ended. */
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
	ipc_forget_opened(record);
	return 0;
}

/* Waiting for the device would invalidate a capture, so memory that is closed during one is unmapped after it. */
static int unmap_closed(const struct driver *cuda)
{
	int status = 0;

	if (captures_under_way())
		return 0;
	memory_enter();
	for (struct opened *record = ipc_opened; record; record = record->next)
		if (record->address && !record->times && !status)
			status = unmap(cuda, record);
	memory_leave();
	return status;
}

bool memory_ipc_open(uint64_t *address, const void *handle, const void *caller, int *status)
{
	const struct driver *cuda;
	struct opened *record;
	struct ipc_handle given;

	memcpy(&given, handle, sizeof(given));
	if (memcmp(given.mark, IPC_MARK, sizeof(given.mark)) != 0)
		return false;
	*status = INVALID_CONTEXT;
	if ((caller && !enter_runtime_device(caller)) || !(cuda = driver()) || !cuda->cuMemImportFromShareableHandle ||
	    !address || given.server == ipc_server_number())
		return true;
	pthread_mutex_lock(&ipc_opening);
	record = find_opened(&given);
	if (record) {
		*status = allow(cuda, record);
		if (!*status && record->times)
			ipc_count(&snapshim_mailbox.ipc_imports, 1);
	} else {
		unmap_closed(cuda);
		*status = open_first(cuda, &given);
		record = find_opened(&given);
	}
	if (!*status) {
		record->times++;
		*address = record->address;
		show();
	}
	pthread_mutex_unlock(&ipc_opening);
	return true;
}

bool memory_ipc_close(uint64_t address, int *status)
{
	const struct driver *cuda = driver();
	struct opened *record;

	if (!cuda)
		return false;
	pthread_mutex_lock(&ipc_opening);
	for (record = ipc_opened; record; record = record->next)
		if (record->times && record->address == address)
			break;
	*status = 0;
	if (record && --record->times) {
		ipc_count(&snapshim_mailbox.ipc_imports, -1);
		show();
	} else if (record) {
		*status = unmap_closed(cuda);
		record->times = *status && record->address; /* it can be closed again */
	}
	pthread_mutex_unlock(&ipc_opening);
	return record != NULL;
}

/* In a forked child. */
void ipc_forget(void)
{
	ipc_server_forget();
	ipc_opened = NULL;
	ipc_opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
