/* Replaces core/control.c, core/exempt_threads.c and core/park.c where a sanitizer must see every thread: a thread that
 * serves the mailbox and is created with pthread_create. PARK only sets the flag; the test ensures that the job is idle
 * meanwhile. */
#define _GNU_SOURCE
#include <string.h>

#include "core/shim.h"

int create_exempt_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	return pthread_create(thread, attributes, routine, argument);
}

bool nccl_contains(const void *address)
{
	return !address;
}

bool captures_under_way(void)
{
	return false;
}

static int dispatch(uint32_t command, int64_t timeout_ns)
{
	if (command >= SNAPSHIM_MEMORY_OPEN)
		return memory_dispatch(command, timeout_ns);
	STORE(&snapshim_mailbox.parked, command == SNAPSHIM_PARK);
	return 0;
}

static void *control(void *nothing)
{
	struct snapshim_mailbox *box = &snapshim_mailbox;
	uint32_t request;

	block_all_signals();
	box->thread = self_tid();
	STORE(&box->owner, self_pid());
	for (;; pause_us(500)) {
		request = LOAD(&box->request);
		if (request == box->answer)
			continue;
		box->text[0] = 0;
		memset(box->result, 0, sizeof(box->result));
		box->status = dispatch(box->command, (int64_t)box->argument[0] * 1000000);
		STORE(&box->answer, request);
	}
	return nothing;
}

__attribute__((constructor)) static void begin(void)
{
	pthread_t thread;

	pthread_create(&thread, NULL, control, NULL);
	pthread_detach(thread);
}
