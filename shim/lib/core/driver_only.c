/* Replaces memory/ in libsnapshim.so, which backs no device memory: all of it is the driver's.
 *
 * That library interposes none of the calls that allocate device memory, so lib/memory cannot affect a job that uses it. */
#include "shim.h"

#include <errno.h>

int memory_dispatch(uint32_t command, int64_t timeout_ns)
{
	(void)command;
	(void)timeout_ns;
	add_text("this rank's library backs no device memory: start the rank with `migrator run --device-memory offload`");
	return ENOSYS;
}

void memory_forget(void)
{
}

bool memory_has_thread(int tid)
{
	(void)tid;
	return false;
}

bool memory_lets_run(void)
{
	return true;
}

bool memory_is_ours(uint64_t address)
{
	(void)address;
	return false;
}

uint64_t memory_share(uint64_t handle)
{
	return handle;
}

bool memory_ipc_get(void *handle, uint64_t address)
{
	(void)handle;
	(void)address;
	return false;
}

bool memory_ipc_open(uint64_t *address, const void *handle, const void *caller, int *status)
{
	(void)address;
	(void)handle;
	(void)caller;
	(void)status;
	return false;
}

bool memory_ipc_close(uint64_t address, int *status)
{
	(void)address;
	(void)status;
	return false;
}
