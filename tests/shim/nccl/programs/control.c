/* In place of shim/lib/core/control.c and shim/lib/core/threads.c where a sanitizer must know every thread: a mailbox, and a thread that serves
 * it, made the ordinary way. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

#include "core/shim.h"

struct snapshim_mailbox snapshim_mailbox = {
	.magic = {'S', 'N', 'A', 'P', 'S', 'H', 'I', 'M'},
	.abi = SNAPSHIM_ABI_VERSION,
	.bytes = sizeof(struct snapshim_mailbox),
};

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
		box->status = nccl_obey(box->command, (int64_t)box->argument[0] * 1000000);
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
