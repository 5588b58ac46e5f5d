/* Counts what a process shares on the GPU and what the driver's checkpoint refuses: managed memory, handles exported to
 * other processes, handles imported from them. Preflight reads the counts.
 *
 * Invariant: every call and its result are CUDA's own, except for handles of memory that we back (memory/ipc_export.c).
 * The library loads without CUDA, and looks up no function before the call. Calls through the runtime's private table of
 * driver functions are not seen here; for those, preflight reads the process's mappings.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>

#define RUNTIME_NOT_FOUND 302 /* cudaErrorSharedObjectSymbolNotFound */
#define DRIVER_NOT_FOUND 500  /* CUDA_ERROR_NOT_FOUND */

struct handle { /* cudaIpcMemHandle_t, CUipcEventHandle …: 64 bytes, by value */
	char bytes[64];
};

/* CUDA does not share memory that the shim backs. Its error does not say why; the reader of the job's log needs the
 * remedy. */
static void warn_of(uint64_t address)
{
	static const char message[] =
		"snapshim: this job shares device memory between processes (cudaIpcGetMemHandle), which is not possible "
		"here with memory that can be offloaded; start it with `migrator run --device-memory driver`\n";
	static bool warned;
	bool before = false;

	if (memory_is_ours(address) && SWAP_IF(&warned, &before, true))
		KERNEL(SYS_write, 2, message, sizeof(message) - 1);
}

static bool get_ours(struct handle *handle, uint64_t address)
{
	if (memory_ipc_get(handle, address))
		return true;
	warn_of(address);
	return false;
}

/* A call that `ours` answers, or that is passed on and counted if it succeeds. */
#define COUNTED_UNLESS(ours, name, file, not_found, counter, change, parameters, arguments)        \
	SNAPSHIM_EXPORT int name parameters;                                                       \
	int name parameters                                                                        \
	{                                                                                          \
		int(*call) parameters;                                                             \
		int status = 0;                                                                    \
                                                                                                   \
		if (ours)                                                                          \
			return status;                                                             \
		call = (int(*) parameters)cuda_function(#name, file, __builtin_return_address(0)); \
		status = call ? call arguments : not_found;                                        \
		if (status == 0)                                                                   \
			__atomic_add_fetch(&snapshim_mailbox.counter, (uint64_t)(change), __ATOMIC_RELAXED); \
		return status;                                                                     \
	}
#define COUNTED_RUNTIME(name, counter, change, parameters, arguments) \
	COUNTED_UNLESS(false, name, CUDA_RUNTIME, RUNTIME_NOT_FOUND, counter, change, parameters, arguments)
#define COUNTED_DRIVER(name, counter, change, parameters, arguments) \
	COUNTED_UNLESS(false, name, CUDA_DRIVER, DRIVER_NOT_FOUND, counter, change, parameters, arguments)
#define OURS_OR_RUNTIME(ours, name, counter, change, parameters, arguments) \
	COUNTED_UNLESS(ours, name, CUDA_RUNTIME, RUNTIME_NOT_FOUND, counter, change, parameters, arguments)
#define OURS_OR_DRIVER(ours, name, counter, change, parameters, arguments) \
	COUNTED_UNLESS(ours, name, CUDA_DRIVER, DRIVER_NOT_FOUND, counter, change, parameters, arguments)

COUNTED_RUNTIME(cudaMallocManaged, managed_allocations, 1, (void **memory, size_t bytes, unsigned int flags),
		(memory, bytes, flags))
OURS_OR_RUNTIME(memory_event_get(handle, event, &status), cudaIpcGetEventHandle, ipc_exports, 1,
		(struct handle * handle, void *event), (handle, event))
OURS_OR_RUNTIME(memory_event_open(event, &handle, __builtin_return_address(0), &status), cudaIpcOpenEventHandle, ipc_imports,
		1, (void **event, struct handle handle), (event, handle))
OURS_OR_RUNTIME(get_ours(handle, (uint64_t)memory), cudaIpcGetMemHandle, ipc_exports, 1,
		(struct handle * handle, void *memory), (handle, memory))
OURS_OR_RUNTIME(memory_ipc_open((uint64_t *)memory, &handle, __builtin_return_address(0), &status), cudaIpcOpenMemHandle,
		ipc_imports, 1, (void **memory, struct handle handle, unsigned int flags), (memory, handle, flags))
OURS_OR_RUNTIME(memory_ipc_close((uint64_t)memory, &status), cudaIpcCloseMemHandle, ipc_imports, -1, (void *memory), (memory))

COUNTED_DRIVER(cuMemAllocManaged, managed_allocations, 1, (uint64_t *memory, size_t bytes, unsigned int flags),
	       (memory, bytes, flags))
OURS_OR_DRIVER(memory_event_get(handle, event, &status), cuIpcGetEventHandle, ipc_exports, 1,
	       (struct handle * handle, void *event), (handle, event))
OURS_OR_DRIVER(memory_event_open(event, &handle, NULL, &status), cuIpcOpenEventHandle, ipc_imports, 1,
	       (void **event, struct handle handle), (event, handle))
OURS_OR_DRIVER(get_ours(handle, memory), cuIpcGetMemHandle, ipc_exports, 1, (struct handle * handle, uint64_t memory),
	       (handle, memory))
OURS_OR_DRIVER(memory_ipc_open(memory, &handle, NULL, &status), cuIpcOpenMemHandle, ipc_imports, 1,
	       (uint64_t *memory, struct handle handle, unsigned int flags), (memory, handle, flags))
OURS_OR_DRIVER(memory_ipc_open(memory, &handle, NULL, &status), cuIpcOpenMemHandle_v2, ipc_imports, 1,
	       (uint64_t *memory, struct handle handle, unsigned int flags), (memory, handle, flags))
OURS_OR_DRIVER(memory_ipc_close(memory, &status), cuIpcCloseMemHandle, ipc_imports, -1, (uint64_t memory), (memory))
COUNTED_DRIVER(cuMemExportToShareableHandle, ipc_exports, 1,
	       (void *handle, uint64_t memory, int kind, unsigned long long flags),
	       (handle, memory_share(memory), kind, flags))
COUNTED_DRIVER(cuMemImportFromShareableHandle, ipc_imports, 1, (uint64_t *memory, void *handle, int kind),
	       (memory, handle, kind))
