/* The interposed operations and queries: from the application's call through the gate to the real library. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "capture.h"
#include "gate.h"
#include "redops.h"

/* A handle that is not ours: the real library's own, passed on untouched. */
static ncclResult_t pass_on(struct nccl_thread *thread, int symbol, const uint64_t *word)
{
	struct nccl_instance *instance = real_instance();

	if (!instance || !instance->function[symbol])
		return answer_missing(thread, symbol);
	return real_call(instance->function[symbol], nccl_shapes[symbol].words, word);
}

static void mark(struct nccl_comm *comm, unsigned int why)
{
	if (why && (atomic_load_explicit(&comm->refused, memory_order_relaxed) & why) != why)
		atomic_fetch_or(&comm->refused, why);
}

/* Launches any operation; `word` has MOST_WORDS words. */
static ncclResult_t launch(int symbol, uint64_t *word, unsigned int why)
{
	struct nccl_thread *thread = thread_self();
	const struct nccl_shape *shape = &nccl_shapes[symbol];
	struct nccl_comm *comm = comm_of(word[(int)shape->comm]);
	struct nccl_call call = {.symbol = symbol, .counts = shape->counts, .comm = comm};
	struct nccl_instance *instance;

	if (thread_inside(thread) || (!comm && thread->depth == 0))
		return pass_on(thread, symbol, word);
	thread->message[0] = 0;
	if (comm) {
		mark(comm, why | (shape->counts >= SIGNAL ? REFUSED_ONE_SIDED : 0));
		if (__builtin_expect(!why && capture_under_way(), 0) && capture_has(word[shape->comm + 1]))
			mark(comm, REFUSED_CAPTURED);
		if (atomic_load_explicit(&comm->state, memory_order_relaxed) == UNUSED)
			return answer_gone(thread, comm, symbol);
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
					word[(int)shape->redop] = redop_real(word[(int)shape->redop], comm, instance);
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

/* A query that the real communicator answers; an error while there is none. */
static ncclResult_t ask(int symbol, uint64_t *word, unsigned int why)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_comm *comm = comm_of(word[(int)nccl_shapes[symbol].comm]);
	struct nccl_instance *instance = real_instance();
	ncclResult_t result;
	ncclComm_t real;

	if (!comm || thread_inside(thread) || !instance || !instance->function[symbol])
		return pass_on(thread, symbol, word);
	thread->message[0] = 0;
	mark(comm, why);
	if (symbol == SYMBOL_ncclCommResume)
		atomic_fetch_and(&comm->refused, ~(unsigned int)REFUSED_SUSPENDED);
	real = ask_begin(thread, comm, symbol);
	instance = real_instance();
	if (real) {
		word[(int)nccl_shapes[symbol].comm] = (uintptr_t)real;
		result = real_call(instance->function[symbol], nccl_shapes[symbol].words, word);
	} else {
		result = thread_error(thread, ncclInvalidUsage, "%s: the communicator is not attached now, for a move",
				      nccl_symbol_names[symbol]);
	}
	ask_end(thread);
	return result;
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
