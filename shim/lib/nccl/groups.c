/* Groups: what is called between ncclGroupStart and the outermost ncclGroupEnd is kept and then launched at once.
 *
 * So the gate sees a group as a whole, and a thread that waits there has no group open in the real library. Invariant: what
 * the arguments point to is copied where NCCL reads it during the call; buffers and out-parameters are the application's
 * until the group ends, as NCCL has it.
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
			return NULL; /* no version's: NCCL shall say so itself */
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

			thread->group_result = thread_says(thread, ncclSystemError, "no memory for a group of %zu calls", room);
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

PROFILED(ncclResult_t, ncclGroupStart, void)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();

	if (!instance)
		return say_missing(thread, SYMBOL_ncclGroupStart);
	if (thread_inside(thread))
		return REAL(instance, ncclGroupStart, ncclResult_t(*)(void))();
	if (thread->depth++ == 0) {
		thread->count = 0;
		thread->group_result = ncclSuccess;
		thread->words[0] = 0;
	}
	return ncclSuccess;
}

static ncclResult_t end(int symbol, void *simulation)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_call *calls = thread->calls;
	size_t count = thread->count;
	ncclResult_t result;

	if (!instance || !instance->function[symbol])
		return say_missing(thread, symbol);
	if (thread_inside(thread) || thread->depth == 0) /* without a beginning: NCCL says what it thinks of it */
		return simulation ? REAL(instance, ncclGroupSimulateEnd, ncclResult_t(*)(void *))(simulation)
				  : REAL(instance, ncclGroupEnd, ncclResult_t(*)(void))();
	if (--thread->depth > 0)
		return ncclSuccess;
	if (count == 0)
		return thread->group_result;
	result = calls_launch(thread, calls, count, true, simulation);
	thread->count = 0;
	return result == ncclSuccess ? thread->group_result : result;
}

PROFILED(ncclResult_t, ncclGroupEnd, void)
{
	return end(SYMBOL_ncclGroupEnd, NULL);
}

PROFILED(ncclResult_t, ncclGroupSimulateEnd, void *simulation)
{
	return end(SYMBOL_ncclGroupSimulateEnd, simulation);
}
