/* Makes calls on the real library, once the gate lets them pass: one call, or a whole group. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "gate.h"
#include "redops.h"

static ncclResult_t make(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	const struct nccl_shape *shape = &nccl_shapes[call->symbol];
	void *function = instance->function[call->symbol];

	if (call->make)
		return call->make(thread, instance, call);
	if (!function)
		return answer_missing(thread, call->symbol);
	if (shape->comm >= 0 && call->comm) {
		ncclComm_t real = atomic_load(&call->comm->real);

		if (!real)
			return answer_gone(thread, call->comm, call->symbol);
		call->word[(int)shape->comm] = (uintptr_t)real;
	}
	if (shape->redop >= 0)
		call->word[(int)shape->redop] = redop_real(call->word[(int)shape->redop], call->comm, instance);
	return real_call(function, shape->words, call->word);
}

ncclResult_t calls_launch(struct nccl_thread *thread, struct nccl_call *calls, size_t count, bool group, void *simulation)
{
	struct nccl_instance *instance;
	ncclResult_t first = ncclSuccess, result = gate_pass(thread, calls, count);
	size_t made = 0;

	if (result != ncclSuccess) {
		for (size_t i = 0; i < count; i++)
			call_done(&calls[i], result);
		return result;
	}
	instance = real_instance();
	if (!instance) {
		first = result = answer_missing(thread, calls[0].symbol);
	} else {
		if (group)
			REAL(instance, ncclGroupStart, ncclResult_t (*)(void))();
		for (made = 0; made < count; made++) {
			result = make(thread, instance, &calls[made]);
			if (first == ncclSuccess || first == ncclInProgress)
				first = result == ncclSuccess ? first : result;
		}
		result = first;
		if (group && simulation && instance->function[SYMBOL_ncclGroupSimulateEnd])
			result = REAL(instance, ncclGroupSimulateEnd, ncclResult_t (*)(void *))(simulation);
		else if (group)
			result = REAL(instance, ncclGroupEnd, ncclResult_t (*)(void))();
		/* A call that only the shim refused was never part of the real group. */
		if (result == ncclSuccess && first != ncclInProgress)
			result = first;
	}
	for (size_t i = 0; i < count; i++)
		call_done(&calls[i], result);
	atomic_store_explicit(&thread->calling, OUTSIDE, memory_order_release);
	return result;
}
