/* Keeps the calls of a group until it ends.
 *
 * Invariant: data that NCCL reads through an argument during the call is copied. Buffers and out-parameters are not: NCCL
 * requires the application to keep them until the group ends.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "calls.h"

static void *copy_of(const struct nccl_call *call)
{
	int place = nccl_shapes[call->symbol].config;

	if (call->counts == WAIT_SIGNAL) {
		size_t bytes = (size_t)(int)call->word[0] * sizeof(ncclWaitSignalDesc_t);
		void *copy = (int)call->word[0] > 0 ? malloc(bytes) : NULL;

		return copy ? memcpy(copy, (const void *)(uintptr_t)call->word[1], bytes) : NULL;
	}
	if (place >= 0 && call->word[place]) {
		const ncclCollConfig_t *config = (const void *)(uintptr_t)call->word[place];
		size_t size = config->size, string = 0;
		ncclCollConfig_t *copy;

		if (size < sizeof(*config) || size > 65536)
			return NULL; /* no version has this size: NCCL reports the error */
		if (config->algorithms)
			string = strlen(config->algorithms) + 1;
		copy = malloc(size + string);
		if (!copy)
			return NULL;
		memcpy(copy, config, size);
		if (string)
			copy->algorithms = memcpy((char *)copy + size, config->algorithms, string);
		return copy;
	}
	return NULL;
}

ncclResult_t group_keep(struct nccl_thread *thread, const struct nccl_call *call)
{
	struct nccl_call *kept;

	if (thread->count == thread->room) {
		size_t room = thread->room ? thread->room * 2 : 64;
		struct nccl_call *calls = realloc(thread->calls, room * sizeof(*calls));

		if (!calls) {
			struct nccl_call lost = *call;

			thread->group_result =
				thread_error(thread, ncclSystemError, "no memory for a group of %zu calls", room);
			call_done(&lost, ncclSystemError);
			return ncclSystemError;
		}
		/* Children point into their call. */
		for (size_t i = 0; i < thread->count; i++)
			if (calls[i].children == 1 && calls[i].symbol != SYMBOL_ncclCommInitAll)
				calls[i].child = &calls[i].only_child;
		thread->calls = calls;
		thread->room = room;
	}
	kept = &thread->calls[thread->count++];
	*kept = *call;
	if (kept->children == 1 && kept->symbol != SYMBOL_ncclCommInitAll)
		kept->child = &kept->only_child;
	if (!kept->copies) {
		kept->copies = copy_of(kept);
		if (kept->copies)
			kept->word[kept->counts == WAIT_SIGNAL ? 1 : (int)nccl_shapes[kept->symbol].config] =
				(uintptr_t)kept->copies;
	}
	return ncclSuccess;
}
