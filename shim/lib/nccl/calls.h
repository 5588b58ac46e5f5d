/* A call of NCCL and its arguments, which is launched at once or kept until its group ends. */
#ifndef SNAPSHIM_NCCL_CALLS_H
#define SNAPSHIM_NCCL_CALLS_H

#include "communicators.h"

enum nccl_counts { NOTHING, COLLECTIVE, SEND, RECEIVE, SIGNAL, WAIT_SIGNAL, CREATION, CREATION_OF_PARENT };

/* Which arguments of a launched operation mean what. */
struct nccl_shape {
	enum nccl_counts counts;
	signed char words, comm, redop, peer, config;
};

extern const struct nccl_shape nccl_shapes[SYMBOLS];

struct nccl_call {
	int symbol;
	enum nccl_counts counts;
	/* Makes the call on the real library; NULL: its words are passed on. */
	ncclResult_t (*make)(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call);
	struct nccl_comm *comm; /* NULL: none, or a real handle, which is in its word */
	struct nccl_comm **child; /* the communicators that it creates */
	int children;
	struct nccl_comm *only_child; /* `child` points here if there is only one */
	ncclComm_t *made; /* ncclCommInitAll: where the real library writes */
	ncclComm_t **out; /* where to store each child's handle for the application */
	void *copies; /* of what the arguments point to; freed with the call */
	bool in_context; /* the call is kept, and is to be made in the CUDA context, and on the device, that was current */
	void *context;
	uint64_t word[MOST_WORDS];
};

/* groups.c: launches the call, or keeps a copy if the thread is inside a group. Takes ownership of what the call owns. */
ncclResult_t call_submit(struct nccl_thread *thread, struct nccl_call *call);
/* launch.c: waits for the gate, then makes all calls, in a real group if `group` is set. Frees what they own. `simulation`:
 * the argument of ncclGroupSimulateEnd, or NULL. */
ncclResult_t calls_launch(struct nccl_thread *thread, struct nccl_call *calls, size_t count, bool group, void *simulation);
/* calls.c: completes or drops the communicators that the call was to create. Frees what the call owns. */
void call_done(struct nccl_call *call, ncclResult_t result);

/* keep.c: keeps a call until the group ends. */
ncclResult_t group_keep(struct nccl_thread *thread, const struct nccl_call *call);

/* The error for a function that the real library lacks, or if there is no real library. */
ncclResult_t answer_missing(struct nccl_thread *thread, int symbol);
/* The error for a communicator that has no real one, with the reason. */
ncclResult_t answer_gone(struct nccl_thread *thread, const struct nccl_comm *comm, int symbol);

/* The beginning and end of a query about a communicator. Between them the worker neither removes the real communicator nor
 * loads a fresh copy of the library, so real_instance() must be called after the beginning. NULL: there is no real one. */
static inline ncclComm_t ask_begin(struct nccl_thread *thread, struct nccl_comm *comm, int symbol)
{
	atomic_store_explicit(&thread->function, nccl_symbol_names[symbol], memory_order_relaxed);
	atomic_store(&thread->calling, CALLING);
	return atomic_load(&comm->real);
}

static inline void ask_end(struct nccl_thread *thread)
{
	atomic_store_explicit(&thread->calling, OUTSIDE, memory_order_release);
}

/* Whether the call comes from inside the real library, which calls some of its own symbols by name. */
static inline bool thread_inside(const struct nccl_thread *thread)
{
	return atomic_load_explicit(&thread->calling, memory_order_relaxed) != OUTSIDE;
}

#define NCCL_EXPORT __attribute__((visibility("default")))
/* The same function under its profiling name. */
#define PROFILED(result, name, ...) \
	NCCL_EXPORT result name(__VA_ARGS__); \
	NCCL_EXPORT result p##name(__VA_ARGS__) __attribute__((alias(#name))); \
	result name(__VA_ARGS__)

#endif
