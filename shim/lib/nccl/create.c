/* Creates communicators: the application gets a virtual handle, and its record the real one.
 *
 * A blocking creation waits for every member, so the gate treats it as an operation. The record keeps what is needed to
 * rebuild the communicator: size, rank, a copy of the config. Invariant: on failure the application has no handle.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "device.h"
#include "ids.h"
#include "redops.h"

/* Returns the handle and launches or keeps the call that creates the communicator. */
static ncclResult_t submit(struct nccl_thread *thread, struct nccl_call *call, struct nccl_comm *child, ncclComm_t *out)
{
	call->out = child ? malloc(sizeof(*call->out)) : NULL;
	if (!call->out) {
		free(call->copies);
		if (child)
			comm_end(child, true);
		return thread_error(thread, ncclSystemError, "no memory for another communicator");
	}
	call->out[0] = out;
	call->only_child = child;
	call->child = &call->only_child;
	call->children = 1;
	*out = (ncclComm_t)child;
	return call_submit(thread, call);
}

static ncclResult_t call_root(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	void *function = instance->function[call->symbol];
	ncclComm_t *into = (ncclComm_t *)&call->child[0]->real;
	const ncclUniqueId *ids = call->copies;
	int nranks = (int)call->word[0], rank = (int)call->word[1], count = (int)call->word[2];
	void *config = (void *)(uintptr_t)call->word[3];

	if (!function)
		return answer_missing(thread, call->symbol);
	if (call->symbol == SYMBOL_ncclCommInitRank)
		return ((ncclResult_t (*)(ncclComm_t *, int, ncclUniqueId, int))function)(into, nranks, *ids, rank);
	if (call->symbol == SYMBOL_ncclCommInitRankConfig)
		return ((ncclResult_t (*)(ncclComm_t *, int, ncclUniqueId, int, void *))function)(into, nranks, *ids, rank,
												  config);
	return ((ncclResult_t (*)(ncclComm_t *, int, int, int, const ncclUniqueId *, void *))function)(into, nranks, rank,
												       count, ids, config);
}

/* A program that drives several devices from one thread selects the next one before each call of its group, and NCCL takes the
 * current one: at the end of the group that would be the last one for all of them. */
static ncclResult_t make_root(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	void *before = call->in_context ? device_context() : NULL;
	ncclResult_t result;

	if (!call->in_context || before == call->context)
		return call_root(thread, instance, call);
	device_set_context(call->context);
	result = call_root(thread, instance, call);
	device_set_context(before);
	return result;
}

static ncclResult_t init(int symbol, ncclComm_t *out, int nranks, const ncclUniqueId *ids, int count, int rank,
			 ncclConfig_t *config)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_call call = {.symbol = symbol, .counts = CREATION, .make = make_root};
	ncclConfig_t *copy = config_copy(config);
	uint64_t id;

	thread->message[0] = 0;
	if (!out || !ids || count < 1) {
		free(copy);
		return thread_error(thread, ncclInvalidArgument, "%s: no place for the handle, or no unique id",
				    nccl_symbol_names[symbol]);
	}
	if (!real_instance()) {
		free(copy);
		return answer_missing(thread, symbol);
	}
	id = hash_bytes(0, ids, (size_t)count * sizeof(*ids));
	id_used(ids, (size_t)count);
	call.word[0] = (uint64_t)nranks;
	call.word[1] = (uint64_t)rank;
	call.word[2] = (uint64_t)count;
	call.word[3] = copy ? (uintptr_t)copy : (uintptr_t)config;
	call.copies = malloc((size_t)count * sizeof(*ids));
	if (!call.copies) {
		free(copy);
		return thread_error(thread, ncclSystemError, "no memory for another communicator");
	}
	memcpy(call.copies, ids, (size_t)count * sizeof(*ids));
	call.in_context = thread->depth > 0;
	call.context = call.in_context ? device_context() : NULL;
	return submit(thread, &call, comm_make(id, BY_INIT, nranks, rank, copy), out);
}

PROFILED(ncclResult_t, ncclCommInitRank, ncclComm_t *out, int nranks, ncclUniqueId id, int rank)
{
	struct nccl_instance *instance = real_instance();

	if (instance && thread_inside(thread_self()))
		return REAL(instance, ncclCommInitRank, ncclResult_t (*)(ncclComm_t *, int, ncclUniqueId, int))(out, nranks,
														id, rank);
	return init(SYMBOL_ncclCommInitRank, out, nranks, &id, 1, rank, NULL);
}

PROFILED(ncclResult_t, ncclCommInitRankConfig, ncclComm_t *out, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
	struct nccl_instance *instance = real_instance();

	if (instance && thread_inside(thread_self()))
		return REAL(instance, ncclCommInitRankConfig,
			    ncclResult_t (*)(ncclComm_t *, int, ncclUniqueId, int, void *))(out, nranks, id, rank, config);
	return init(SYMBOL_ncclCommInitRankConfig, out, nranks, &id, 1, rank, config);
}

PROFILED(ncclResult_t, ncclCommInitRankScalable, ncclComm_t *out, int nranks, int rank, int count, ncclUniqueId *ids,
	 ncclConfig_t *config)
{
	struct nccl_instance *instance = real_instance();

	if (!instance || !instance->function[SYMBOL_ncclCommInitRankScalable])
		return answer_missing(thread_self(), SYMBOL_ncclCommInitRankScalable);
	if (thread_inside(thread_self()))
		return REAL(instance, ncclCommInitRankScalable,
			    ncclResult_t (*)(ncclComm_t *, int, int, int, ncclUniqueId *, void *))(out, nranks, rank, count,
												   ids, config);
	return init(SYMBOL_ncclCommInitRankScalable, out, nranks, ids, count, rank, config);
}

static ncclResult_t make_all(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	(void)thread;
	return REAL(instance, ncclCommInitAll, ncclResult_t (*)(ncclComm_t *, int, const int *))(call->made, call->children,
												 call->copies);
}

PROFILED(ncclResult_t, ncclCommInitAll, ncclComm_t *out, int count, const int *devices)
{
	static _Atomic uint64_t calls;
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_call call = {.symbol = SYMBOL_ncclCommInitAll, .counts = CREATION, .make = make_all};
	const uint64_t name[] = {atomic_fetch_add(&calls, 1) + 1, (uintptr_t)&calls};
	uint64_t id = hash_bytes((uint64_t)atomic_load(&thread->tid), name, sizeof(name));

	if (!instance)
		return answer_missing(thread, SYMBOL_ncclCommInitAll);
	if (thread_inside(thread) || !out || count < 1)
		return REAL(instance, ncclCommInitAll, ncclResult_t (*)(ncclComm_t *, int, const int *))(out, count, devices);
	thread->message[0] = 0;
	call.child = calloc((size_t)count, sizeof(*call.child));
	call.out = calloc((size_t)count, sizeof(*call.out));
	call.made = calloc((size_t)count, sizeof(*call.made));
	call.copies = devices ? malloc((size_t)count * sizeof(int)) : NULL;
	if (call.copies)
		memcpy(call.copies, devices, (size_t)count * sizeof(int));
	while (call.child && call.out && call.made && call.children < count) {
		struct nccl_comm *child = comm_make(id, BY_INIT_ALL, count, call.children, NULL);

		if (!child)
			break;
		if (devices)
			atomic_store(&child->device, devices[call.children]);
		call.child[call.children] = child;
		call.out[call.children] = &out[call.children];
		out[call.children++] = (ncclComm_t)child;
	}
	if (call.children == count && (call.copies || !devices))
		return call_submit(thread, &call);
	call_done(&call, ncclSystemError);
	return thread_error(thread, ncclSystemError, "no memory for another communicator");
}

/* Split, shrink and grow: passes on the words, with the real parent, and lets NCCL write into the child's record. */
static ncclResult_t make_child(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	static const struct {
		int symbol, words, out;
	} shapes[] = {{SYMBOL_ncclCommSplit, 5, 3}, {SYMBOL_ncclCommShrink, 6, 3}, {SYMBOL_ncclCommGrow, 6, 4}};
	ncclComm_t nowhere = NULL, real = call->comm ? atomic_load(&call->comm->real) : NULL;
	int i = 0;

	while (shapes[i].symbol != call->symbol)
		i++;
	if (call->comm && !real)
		return answer_gone(thread, call->comm, call->symbol);
	if (call->comm)
		call->word[0] = (uintptr_t)real;
	call->word[shapes[i].out] = call->children ? (uintptr_t)&call->child[0]->real : (uintptr_t)&nowhere;
	return real_call(instance->function[call->symbol], shapes[i].words, call->word);
}

static bool passes(struct nccl_thread *thread, struct nccl_comm *parent, int symbol)
{
	struct nccl_instance *instance = real_instance();

	return !instance || !instance->function[symbol] || thread_inside(thread) ||
	       (!parent && symbol != SYMBOL_ncclCommGrow);
}

static ncclResult_t pass(struct nccl_thread *thread, int symbol, int words, const uint64_t *word)
{
	struct nccl_instance *instance = real_instance();

	if (!instance || !instance->function[symbol])
		return answer_missing(thread, symbol);
	return real_call(instance->function[symbol], words, word);
}

PROFILED(ncclResult_t, ncclCommSplit, ncclComm_t handle, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_comm *parent = comm_of((uintptr_t)handle);
	struct nccl_call call = {
		.symbol = SYMBOL_ncclCommSplit,
		.counts = CREATION_OF_PARENT,
		.make = make_child,
		.comm = parent,
		.word = {(uintptr_t)handle, (unsigned int)color, (unsigned int)key, (uintptr_t)out, (uintptr_t)config},
	};
	ncclConfig_t *copy;
	uint64_t name[2];

	if (passes(thread, parent, SYMBOL_ncclCommSplit) || !out)
		return pass(thread, SYMBOL_ncclCommSplit, 5, call.word);
	thread->message[0] = 0;
	name[0] = atomic_fetch_add(&parent->splits, 1);
	name[1] = (unsigned int)color;
	if (color == SPLIT_NO_COLOR) {
		*out = NULL;
		return call_submit(thread, &call);
	}
	copy = config_copy(config ? config : parent->config);
	if (config && copy)
		call.word[4] = (uintptr_t)copy;
	return submit(thread, &call, comm_make(hash_bytes(parent->id, name, sizeof(name)), BY_SPLIT, -1, -1, copy), out);
}

static int compare(const void *a, const void *b)
{
	return (*(const int *)a > *(const int *)b) - (*(const int *)a < *(const int *)b);
}

PROFILED(ncclResult_t, ncclCommShrink, ncclComm_t handle, int *excluded, int count, ncclComm_t *out, ncclConfig_t *config,
	 int flags)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_comm *parent = comm_of((uintptr_t)handle);
	struct nccl_call call = {
		.symbol = SYMBOL_ncclCommShrink,
		.counts = CREATION, /* the excluded ranks do not take part: not an operation of the parent */
		.make = make_child,
		.comm = parent,
		.word = {(uintptr_t)handle, (uintptr_t)excluded, (unsigned int)count, (uintptr_t)out, (uintptr_t)config,
			 (unsigned int)flags},
	};
	ncclConfig_t *copy;
	int nranks, rank, before = 0;

	if (passes(thread, parent, SYMBOL_ncclCommShrink) || !out || !excluded || count < 1)
		return pass(thread, SYMBOL_ncclCommShrink, 6, call.word);
	thread->message[0] = 0;
	call.copies = malloc((size_t)count * sizeof(int));
	if (!call.copies)
		return thread_error(thread, ncclSystemError, "no memory for another communicator");
	memcpy(call.copies, excluded, (size_t)count * sizeof(int));
	qsort(call.copies, (size_t)count, sizeof(int), compare);
	call.word[1] = (uintptr_t)call.copies;
	copy = config_copy(config ? config : parent->config);
	if (config && copy)
		call.word[4] = (uintptr_t)copy;
	nranks = atomic_load(&parent->nranks);
	rank = atomic_load(&parent->rank);
	for (int i = 0; i < count; i++)
		before += ((int *)call.copies)[i] < rank;
	return submit(thread, &call,
		      comm_make(hash_bytes(parent->id ^ 1, call.copies, (size_t)count * sizeof(int)), BY_SHRINK,
				nranks < 0 ? -1 : nranks - count, rank < 0 ? -1 : rank - before, copy),
		      out);
}

PROFILED(ncclResult_t, ncclCommGrow, ncclComm_t handle, int nranks, const ncclUniqueId *id, int rank, ncclComm_t *out,
	 ncclConfig_t *config)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_comm *parent = comm_of((uintptr_t)handle);
	struct nccl_call call = {
		.symbol = SYMBOL_ncclCommGrow,
		.counts = CREATION,
		.make = make_child,
		.comm = parent,
		.word = {(uintptr_t)handle, (unsigned int)nranks, (uintptr_t)id, (unsigned int)rank, (uintptr_t)out,
			 (uintptr_t)config},
	};
	ncclConfig_t *copy;

	if (passes(thread, parent, SYMBOL_ncclCommGrow) || !out || (handle && !parent))
		return pass(thread, SYMBOL_ncclCommGrow, 6, call.word);
	thread->message[0] = 0;
	copy = config_copy(config ? config : parent ? parent->config : NULL);
	if (config && copy)
		call.word[5] = (uintptr_t)copy;
	if (id) {
		call.copies = malloc(sizeof(*id));
		if (call.copies)
			call.word[2] = (uintptr_t)memcpy(call.copies, id, sizeof(*id));
	}
	return submit(thread, &call,
		      comm_make(parent ? hash_bytes(parent->id, "grow", 4) : hash_bytes(0, id, sizeof(*id)), BY_GROW, nranks,
				rank, copy),
		      out);
}
