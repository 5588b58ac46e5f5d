/* Groups: calls between ncclGroupStart and the outermost ncclGroupEnd are kept (keep.c) and then launched at once.
 *
 * So the gate sees a group as a whole, and a thread that waits there has no group open in the real library.
 */
#define _GNU_SOURCE
#include "calls.h"

ncclResult_t call_submit(struct nccl_thread *thread, struct nccl_call *call)
{
	if (thread->depth > 0)
		return group_keep(thread, call);
	return calls_launch(thread, call, 1, false, NULL);
}

PROFILED(ncclResult_t, ncclGroupStart, void)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();

	if (!instance)
		return answer_missing(thread, SYMBOL_ncclGroupStart);
	if (thread_inside(thread))
		return REAL(instance, ncclGroupStart, ncclResult_t (*)(void))();
	if (thread->depth++ == 0) {
		thread->count = 0;
		thread->group_result = ncclSuccess;
		thread->message[0] = 0;
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
		return answer_missing(thread, symbol);
	if (thread_inside(thread) || thread->depth == 0) /* without ncclGroupStart: NCCL returns its own error */
		return simulation ? REAL(instance, ncclGroupSimulateEnd, ncclResult_t (*)(void *))(simulation) :
				    REAL(instance, ncclGroupEnd, ncclResult_t (*)(void))();
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
