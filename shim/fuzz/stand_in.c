/* Replaces nccl/real.c and nccl/own_threads.c: see stand_in.h. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <errno.h>
#include <stdatomic.h>

#include "core/shim.h"
#include "nccl/own_threads.h"
#include "nccl/real.h"

#define MOST_RANKS 100000 /* larger than any that exists */
#define MOST_COMMS 1024

#define X(name, ...) [SYMBOL_##name] = #name,
const char *const nccl_symbol_names[SYMBOLS] = {NCCL_LAUNCHED(X) NCCL_REFUSED(X) NCCL_ASKED(X) NCCL_WRITTEN(X)};
#undef X

enum { NOT_LOADED = 1, CREATE_FAILS = 2, IN_PROGRESS = 4, DESTROY_FAILS = 8, UNKNOWN = 16, FRESH_FAILS = 32 };

struct ncclComm {
	int nranks, rank;
};

static struct ncclComm records[MOST_COMMS];
static _Atomic unsigned int next, behaviour;
static _Atomic bool used; /* NCCL is never unloaded */

void stand_in_choose(unsigned int chosen)
{
	atomic_store(&behaviour, chosen);
}

void stand_in_forget(void)
{
	stand_in_choose(0);
	atomic_store(&used, false);
}

void stand_in_take(struct input *input)
{
	stand_in_choose((unsigned int)take(input, 1));
}

static ncclResult_t succeed(void)
{
	return ncclSuccess;
}

static ncclResult_t make(ncclComm_t *out, int nranks, int rank)
{
	struct ncclComm *record = &records[atomic_fetch_add(&next, 1) % MOST_COMMS];

	/* As NCCL itself does it. */
	if (nranks < 1 || nranks > MOST_RANKS || rank < 0 || rank >= nranks)
		return ncclInvalidArgument;
	if (atomic_load(&behaviour) & CREATE_FAILS)
		return ncclSystemError;
	atomic_store(&used, true);
	*record = (struct ncclComm){nranks, rank};
	*out = record;
	return atomic_load(&behaviour) & IN_PROGRESS ? ncclInProgress : ncclSuccess;
}

static ncclResult_t init(ncclComm_t *out, int nranks, ncclUniqueId id, int rank)
{
	(void)id;
	return make(out, nranks, rank);
}

static ncclResult_t init_config(ncclComm_t *out, int nranks, ncclUniqueId id, int rank, void *config)
{
	(void)config;
	return init(out, nranks, id, rank);
}

static ncclResult_t split(ncclComm_t parent, int color, int key, ncclComm_t *out, void *config)
{
	(void)key;
	(void)config;
	return color < 0 ? ncclSuccess : make(out, parent->nranks, parent->rank);
}

static ncclResult_t shrink(ncclComm_t parent, int *excluded, int count, ncclComm_t *out, void *config, int flags)
{
	int rank = parent->rank;

	(void)config;
	(void)flags;
	for (int i = 0; i < count; i++)
		rank -= excluded[i] < parent->rank;
	return make(out, parent->nranks - count, rank);
}

static ncclResult_t state_of(ncclComm_t comm, ncclResult_t *state)
{
	(void)comm;
	*state = atomic_load(&behaviour) & IN_PROGRESS ? ncclInProgress : ncclSuccess;
	return ncclSuccess;
}

static ncclResult_t count_of(ncclComm_t comm, int *count)
{
	*count = comm->nranks;
	return atomic_load(&behaviour) & UNKNOWN ? ncclInvalidArgument : ncclSuccess;
}

static ncclResult_t rank_of(ncclComm_t comm, int *rank)
{
	*rank = comm->rank;
	return atomic_load(&behaviour) & UNKNOWN ? ncclInvalidArgument : ncclSuccess;
}

static ncclResult_t device_of(ncclComm_t comm, int *device)
{
	(void)comm;
	*device = 0;
	return ncclSuccess;
}

static ncclResult_t end(ncclComm_t comm)
{
	(void)comm;
	return atomic_load(&behaviour) & DESTROY_FAILS ? ncclSystemError : ncclSuccess;
}

static ncclResult_t new_id(ncclUniqueId *id)
{
	memset(id, (int)atomic_fetch_add(&next, 1), sizeof(*id));
	return ncclSuccess;
}

/* The trial of an attach: the sum of all ranks, now and then a wrong one. */
static ncclResult_t all_reduce(uint64_t from, uint64_t to, uint64_t count, uint64_t type, uint64_t op, ncclComm_t comm,
			       uint64_t stream)
{
	uint64_t sum = (uint64_t)comm->nranks * ((uint64_t)comm->nranks + 1) / 2;

	(void)from;
	(void)type;
	(void)op;
	(void)stream;
	if (count == 1)
		*(int32_t *)(uintptr_t)to = (int32_t)(uint32_t)sum;
	return ncclSuccess;
}

struct nccl_instance *real_instance(void)
{
	static struct nccl_instance instance = {.version = 22809};

	if (atomic_load(&behaviour) & NOT_LOADED && !atomic_load(&used))
		return NULL;
	if (!instance.function[SYMBOL_ncclCommInitRank]) {
		for (int i = 0; i < SYMBOLS; i++)
			instance.function[i] = (void *)succeed;
		instance.function[SYMBOL_ncclCommInitRankConfig] = (void *)init_config;
		instance.function[SYMBOL_ncclCommSplit] = (void *)split;
		instance.function[SYMBOL_ncclCommShrink] = (void *)shrink;
		instance.function[SYMBOL_ncclCommGetAsyncError] = (void *)state_of;
		instance.function[SYMBOL_ncclCommCount] = (void *)count_of;
		instance.function[SYMBOL_ncclCommUserRank] = (void *)rank_of;
		instance.function[SYMBOL_ncclCommCuDevice] = (void *)device_of;
		instance.function[SYMBOL_ncclCommFinalize] = (void *)end;
		instance.function[SYMBOL_ncclCommDestroy] = (void *)end;
		instance.function[SYMBOL_ncclGetUniqueId] = (void *)new_id;
		instance.function[SYMBOL_ncclAllReduce] = (void *)all_reduce;
		instance.function[SYMBOL_ncclCommInitRank] = (void *)init;
	}
	return &instance;
}

bool nccl_contains(const void *address)
{
	(void)address;
	return false;
}

struct nccl_instance *real_containing(const void *address)
{
	(void)address;
	return NULL;
}

bool thread_exists(int tid)
{
	(void)tid;
	return false;
}

const char *real_path(void)
{
	return "/a \"path\"\n\\";
}

int real_load_fresh(char *message, size_t room)
{
	if (!(atomic_load(&behaviour) & FRESH_FAILS))
		return 0;
	snprintf(message, room, "does not load");
	return ELIBACC;
}

int threads_started_by(const struct nccl_instance *library, int *unseen)
{
	(void)library;
	(void)unseen;
	return 0;
}

ncclResult_t real_call(void *function, int words, const uint64_t *w)
{
	(void)words; /* the conventions of both architectures ignore arguments that a function does not have */
	return ((ncclResult_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))function)(
		w[0], w[1], w[2], w[3], w[4], w[5], w[6]);
}
