/* Handles contexts that the job ends while we have streams and pinned memory in them. CUDA releases those, and their handles
 * become invalid.
 *
 * Invariant: no worker creates or releases anything in a context while one ends; what READY created there is not used
 * afterwards.
 */
#define _GNU_SOURCE
#include <string.h>

#include "memory.h"
#include "stripes.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

bool contexts_hold(int64_t until_ns)
{
	while (pthread_mutex_trylock(&mutex) != 0) {
		if (LOAD(&snapshim_mailbox.parked) || now_ns() >= until_ns)
			return false;
		pause_us(100);
	}
	return true;
}

void contexts_let_go(void)
{
	pthread_mutex_unlock(&mutex);
}

void context_ends(int device, const void *context)
{
	memory_enter();
	pthread_mutex_lock(&mutex);
	for (int i = 0; i < DEVICES_MAX; i++)
		if (stripes.devices >> i & 1 && (i == device || (context && stripes.context[i] == context)))
			stripes.invalid = true;
	if (!stripes.invalid)
		return;
	stripes.entered = 0;
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++) {
		memset(workers[i].slot, 0, sizeof(workers[i].slot));
		memset(workers[i].stream, 0, sizeof(workers[i].stream));
	}
}

void context_has_ended(void)
{
	pthread_mutex_unlock(&mutex);
	memory_leave();
}

/* In a forked child. */
void contexts_forget(void)
{
	pthread_mutex_init(&mutex, NULL);
}
