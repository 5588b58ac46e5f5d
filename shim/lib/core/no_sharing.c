/* Replaces sharing/ in the libraries that leave memory which processes share as it is: a rank with such memory does not move.
 *
 * Those libraries interpose no call that records an event, and take no step for a move in a job that runs. */
#include "shim.h"

#include <errno.h>

#include "sharing/sharing.h"

bool sharing_moves(void)
{
	return false;
}

bool sharing_is_inside(int pid)
{
	(void)pid;
	return true;
}

int sharing_dispatch(uint32_t command, int64_t until_ns)
{
	(void)command;
	(void)until_ns;
	add_text("this rank's library does not move device memory that processes share: start the rank with `migrator run "
		 "--device-memory shared`");
	return ENOSYS;
}

void sharing_forget(void)
{
}

bool memory_event_get(void *handle, void *event, int *status)
{
	(void)handle;
	(void)event;
	(void)status;
	return false;
}

bool memory_event_open(void **event, const void *handle, const void *caller, int *status)
{
	(void)event;
	(void)handle;
	(void)caller;
	(void)status;
	return false;
}
