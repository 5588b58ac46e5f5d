/* The layout of each call's arguments, the handling of its outcome, and the errors for calls that cannot reach the real
 * library. */
#define _GNU_SOURCE
#include "calls.h"

#include <stdlib.h>

#define X(name, words, counts, comm, redop, peer, config) [SYMBOL_##name] = {counts, words, comm, redop, peer, config},
#define X_REFUSED(name, words, comm, why) [SYMBOL_##name] = {COLLECTIVE, words, comm, -1, -1, -1},
#define X_ASKED(name, words, comm, why) [SYMBOL_##name] = {NOTHING, words, comm, -1, -1, -1},
#define X_WRITTEN(name) [SYMBOL_##name] = {NOTHING, 0, -1, -1, -1, -1},
const struct nccl_shape nccl_shapes[SYMBOLS] = {NCCL_LAUNCHED(X) NCCL_REFUSED(X_REFUSED) NCCL_ASKED(X_ASKED)
							NCCL_WRITTEN(X_WRITTEN)};
#undef X

ncclResult_t answer_missing(struct nccl_thread *thread, int symbol)
{
	struct nccl_instance *instance = real_instance();

	if (!instance)
		return thread_error(thread, ncclSystemError, "%s: no libnccl is loaded in this process",
				    nccl_symbol_names[symbol]);
	return thread_error(thread, ncclInvalidUsage, "this NCCL (%d.%d.%d) has no %s", instance->version / 10000,
			    instance->version / 100 % 100, instance->version % 100, nccl_symbol_names[symbol]);
}

ncclResult_t answer_gone(struct nccl_thread *thread, const struct nccl_comm *comm, int symbol)
{
	int state = atomic_load(&comm->state);

	if (state == UNUSED || state == ENDING)
		return thread_error(thread, ncclInvalidArgument, "%s: the communicator has been destroyed",
				    nccl_symbol_names[symbol]);
	if (state == PENDING || state == LIVE)
		return thread_error(thread, ncclInvalidArgument, "%s: the communicator is not ready yet",
				    nccl_symbol_names[symbol]);
	return thread_error(thread, ncclSystemError,
			    "%s: communicator %016lx was taken down for a move and could not be attached again",
			    nccl_symbol_names[symbol], (unsigned long)comm->id);
}

void call_done(struct nccl_call *call, ncclResult_t result)
{
	struct nccl_instance *instance = real_instance();

	for (int i = 0; i < call->children; i++) {
		struct nccl_comm *child = call->child[i];

		if (call->made && call->made[i])
			atomic_store(&child->real, call->made[i]);
		if (result == ncclSuccess || result == ncclInProgress) {
			ncclComm_t real = atomic_load(&child->real);

			atomic_store(&child->initialising, result == ncclInProgress || !real || !comm_blocks(child));
			atomic_store(&child->state, LIVE);
			if (real && result == ncclSuccess && comm_blocks(child))
				comm_learn(child, real, instance);
		} else {
			*call->out[i] = NULL;
			comm_end(child, true);
		}
	}
	if (call->children > 0 && call->child != &call->only_child)
		free(call->child);
	if (call->children > 0)
		free(call->out);
	free(call->made);
	free(call->copies);
	call->children = 0;
	call->made = NULL;
	call->copies = NULL;
}
