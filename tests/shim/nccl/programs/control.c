/* Replaces core/control.c and core/exempt_threads.c where a sanitizer must see every thread: a thread that serves the
 * mailbox and is created with pthread_create. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

#include "core/shim.h"

create_thread_fn *libc_create_thread(void)
{
	return pthread_create;
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
		box->status = nccl_dispatch(box->command, (int64_t)box->argument[0] * 1000000);
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
