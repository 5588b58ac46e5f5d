/* Operations: from the application's call through the gate to the real library. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "capture.h"
#include "gate.h"
#include "redops.h"

#define X(name, words, counts, comm, redop, peer, config) [SYMBOL_##name] = {counts, words, comm, redop, peer, config},
#define X_REFUSED(name, words, comm, why) [SYMBOL_##name] = {COLLECTIVE, words, comm, -1, -1, -1},
#define X_ASKED(name, words, comm, why) [SYMBOL_##name] = {NOTHING, words, comm, -1, -1, -1},
#define X_WRITTEN(name) [SYMBOL_##name] = {NOTHING, 0, -1, -1, -1, -1},
const struct nccl_shape nccl_shapes[SYMBOLS] = {
	NCCL_LAUNCHED(X) NCCL_REFUSED(X_REFUSED) NCCL_ASKED(X_ASKED) NCCL_WRITTEN(X_WRITTEN)};
#undef X

ncclResult_t say_missing(struct nccl_thread *thread, int symbol)
{
	struct nccl_instance *instance = real_instance();

	if (!instance)
		return thread_says(thread, ncclSystemError, "%s: no libnccl is loaded in this process",
				   nccl_symbol_names[symbol]);
	return thread_says(thread, ncclInvalidUsage, "this NCCL (%d.%d.%d) has no %s", instance->version / 10000,
			   instance->version / 100 % 100, instance->version % 100, nccl_symbol_names[symbol]);
}

ncclResult_t say_gone(struct nccl_thread *thread, const struct nccl_comm *comm, int symbol)
{
	int state = atomic_load(&comm->state);

	if (state == UNUSED || state == ENDING)
		return thread_says(thread, ncclInvalidArgument, "%s: the communicator has been destroyed",
				   nccl_symbol_names[symbol]);
	if (state == PENDING || state == LIVE)
		return thread_says(thread, ncclInvalidArgument, "%s: the communicator is not ready yet",
				   nccl_symbol_names[symbol]);
	return thread_says(thread, ncclSystemError,
			   "%s: communicator %016lx was taken down for a move and could not be attached again",
			   nccl_symbol_names[symbol], (unsigned long)comm->id);
}

/* A handle that is not ours: the real library's own, passed on untouched. */
static ncclResult_t pass_on(struct nccl_thread *thread, int symbol, const uint64_t *word)
{
	struct nccl_instance *instance = real_instance();

	if (!instance || !instance->function[symbol])
		return say_missing(thread, symbol);
	return real_call(instance->function[symbol], nccl_shapes[symbol].words, word);
}

static void mark(struct nccl_comm *comm, unsigned int why)
{
	if (why && (atomic_load_explicit(&comm->refused, memory_order_relaxed) & why) != why)
		atomic_fetch_or(&comm->refused, why);
}

static ncclResult_t make(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	const struct nccl_shape *shape = &nccl_shapes[call->symbol];
	void *function = instance->function[call->symbol];

	if (call->make)
		return call->make(thread, instance, call);
	if (!function)
		return say_missing(thread, call->symbol);
	if (shape->comm >= 0 && call->comm) {
		ncclComm_t real = atomic_load(&call->comm->real);

		if (!real)
			return say_gone(thread, call->comm, call->symbol);
		call->word[(int)shape->comm] = (uintptr_t)real;
	}
	if (shape->redop >= 0)
		call->word[(int)shape->redop] = redop_real(call->word[(int)shape->redop], call->comm, instance);
	return real_call(function, shape->words, call->word);
}

/* The way of every operation; `word` has MOST_WORDS words. */
static ncclResult_t launch(int symbol, uint64_t *word, unsigned int why)
{
	struct nccl_thread *thread = thread_self();
	const struct nccl_shape *shape = &nccl_shapes[symbol];
	struct nccl_comm *comm = comm_of(word[(int)shape->comm]);
	struct nccl_call call = {.symbol = symbol, .counts = shape->counts, .comm = comm};
	struct nccl_instance *instance;

	if (thread_inside(thread) || (!comm && thread->depth == 0))
		return pass_on(thread, symbol, word);
	thread->words[0] = 0;
	if (comm) {
		mark(comm, why | (shape->counts >= SIGNAL ? REFUSED_ONE_SIDED : 0));
		if (__builtin_expect(!why && capture_under_way(), 0) && capture_has(word[shape->comm + 1]))
			mark(comm, REFUSED_CAPTURED);
		if (atomic_load_explicit(&comm->state, memory_order_relaxed) == UNUSED)
			return say_gone(thread, comm, symbol);
	}
	if (__builtin_expect(thread->depth == 0 && shape->counts < SIGNAL, 1)) {
		atomic_store(&thread->calling, DECIDING);
		if (__builtin_expect(atomic_load(&gate_word) == GATE_OPEN, 1)) {
			ncclComm_t real = atomic_load(&comm->real);

			instance = real_instance();
			if (__builtin_expect(real && instance && instance->function[symbol], 1)) {
				ncclResult_t result;

				gate_count(thread, comm, shape, word);
				atomic_store_explicit(&thread->function, nccl_symbol_names[symbol], memory_order_relaxed);
				atomic_store_explicit(&thread->calling, CALLING, memory_order_release);
				word[(int)shape->comm] = (uintptr_t)real;
				if (shape->redop >= 0 && (int)word[(int)shape->redop] >= FIRST_USER_REDOP)
					word[(int)shape->redop] =
						redop_real(word[(int)shape->redop], comm, instance);
				result = real_call(instance->function[symbol], shape->words, word);
				atomic_store_explicit(&thread->calling, OUTSIDE, memory_order_release);
				return result;
			}
		}
		atomic_store_explicit(&thread->calling, OUTSIDE, memory_order_release);
	}
	for (int i = 0; i < MOST_WORDS; i++)
		call.word[i] = word[i];
	return call_submit(thread, &call);
}

/* A question: the real one answers now, or once there is one again. */
static ncclResult_t ask(int symbol, uint64_t *word, unsigned int why)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_comm *comm = comm_of(word[(int)nccl_shapes[symbol].comm]);
	struct nccl_instance *instance = real_instance();
	ncclResult_t result;
	ncclComm_t real;

	if (!comm || thread_inside(thread) || !instance || !instance->function[symbol])
		return pass_on(thread, symbol, word);
	thread->words[0] = 0;
	mark(comm, why);
	if (symbol == SYMBOL_ncclCommResume)
		atomic_fetch_and(&comm->refused, ~(unsigned int)REFUSED_SUSPENDED);
	real = ask_begin(thread, comm, symbol);
	instance = real_instance();
	if (real) {
		word[(int)nccl_shapes[symbol].comm] = (uintptr_t)real;
		result = real_call(instance->function[symbol], nccl_shapes[symbol].words, word);
	} else {
		result = thread_says(thread, ncclInvalidUsage, "%s: the communicator is not attached now, for a move",
				     nccl_symbol_names[symbol]);
	}
	ask_end(thread);
	return result;
}

ncclResult_t calls_launch(struct nccl_thread *thread, struct nccl_call *calls, size_t count, bool group,
			  void *simulation)
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
		first = result = say_missing(thread, calls[0].symbol);
	} else {
		if (group)
			REAL(instance, ncclGroupStart, ncclResult_t(*)(void))();
		for (made = 0; made < count; made++) {
			result = make(thread, instance, &calls[made]);
			if (first == ncclSuccess || first == ncclInProgress)
				first = result == ncclSuccess ? first : result;
		}
		result = first;
		if (group && simulation && instance->function[SYMBOL_ncclGroupSimulateEnd])
			result = REAL(instance, ncclGroupSimulateEnd, ncclResult_t(*)(void *))(simulation);
		else if (group)
			result = REAL(instance, ncclGroupEnd, ncclResult_t(*)(void))();
		/* A call that only the shim found wrong never reached the real group. */
		if (result == ncclSuccess && first != ncclInProgress)
			result = first;
	}
	for (size_t i = 0; i < count; i++)
		call_done(&calls[i], result);
	atomic_store_explicit(&thread->calling, OUTSIDE, memory_order_release);
	return result;
}

ncclResult_t call_submit(struct nccl_thread *thread, struct nccl_call *call)
{
	if (thread->depth > 0)
		return group_keep(thread, call);
	return calls_launch(thread, call, 1, false, NULL);
}

#define WORDS_1 uint64_t a
#define WORDS_2 WORDS_1, uint64_t b
#define WORDS_3 WORDS_2, uint64_t c
#define WORDS_4 WORDS_3, uint64_t d
#define WORDS_5 WORDS_4, uint64_t e
#define WORDS_6 WORDS_5, uint64_t f
#define WORDS_7 WORDS_6, uint64_t g
#define WORDS_8 WORDS_7, uint64_t h
#define WORDS_9 WORDS_8, uint64_t i
#define WORDS_11 WORDS_9, uint64_t j, uint64_t k
#define GIVEN_1 a
#define GIVEN_2 GIVEN_1, b
#define GIVEN_3 GIVEN_2, c
#define GIVEN_4 GIVEN_3, d
#define GIVEN_5 GIVEN_4, e
#define GIVEN_6 GIVEN_5, f
#define GIVEN_7 GIVEN_6, g
#define GIVEN_8 GIVEN_7, h
#define GIVEN_9 GIVEN_8, i
#define GIVEN_11 GIVEN_9, j, k

#define WRAPPER(name, words, way, why)                           \
	PROFILED(ncclResult_t, name, WORDS_##words)                  \
	{                                                            \
		uint64_t word[MOST_WORDS] = {GIVEN_##words};             \
                                                             \
		return way(SYMBOL_##name, word, why);                    \
	}
#define X(name, words, ...) WRAPPER(name, words, launch, 0)
NCCL_LAUNCHED(X)
#undef X
#define X(name, words, comm, why) WRAPPER(name, words, launch, why)
NCCL_REFUSED(X)
#undef X
#define X(name, words, comm, why) WRAPPER(name, words, ask, why)
NCCL_ASKED(X)
