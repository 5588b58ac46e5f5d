/* Virtual communicators: the application's handles, and everything that is needed to rebuild a real communicator. */
#ifndef SNAPSHIM_NCCL_COMMUNICATORS_H
#define SNAPSHIM_NCCL_COMMUNICATORS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "threads.h"

enum nccl_state {
	UNUSED = 0,
	PENDING,   /* the application has the handle, its creation has not returned */
	LIVE,    /* `real` is set (a non-blocking one: will be) */
	DETACHING, /* the shim's worker has it */
	DETACHED,  /* nothing real is left; can be attached again */
	ATTACHING, /* the shim's worker has it */
	LOST,    /* abandoned when the gate opened: every operation answers an error */
	ENDING,    /* inside the application's destroy or abort */
};

enum nccl_kind { BY_INIT, BY_SPLIT, BY_SHRINK, BY_GROW, BY_INIT_ALL };

/* Why a communicator cannot be detached and rebuilt; bits. */
enum nccl_refusal {
	REFUSED_CAPTURED = 1,
	REFUSED_WINDOW = 2,
	REFUSED_DEVICE_COMM = 4,
	REFUSED_ONE_SIDED = 8,
	REFUSED_GROWN = 16,
	REFUSED_REVOKED = 32,
	REFUSED_SUSPENDED = 64,
};

#define USERS 16 /* threads remembered per communicator; programs have one or two */

struct nccl_registration {
	struct nccl_registration *next;
	void *buffer, *real;
	size_t bytes;
};

/* Operations launched, by peer. */
struct nccl_peers {
	int ranks;
	struct {
		_Atomic uint64_t sent, received;
	} with[];
};

struct nccl_comm {
	_Atomic(ncclComm_t) real; /* NULL: none now. NCCL itself writes it when it creates one */
	_Atomic int state;
	_Atomic int nranks, rank, device; /* -1: not known yet */
	_Atomic unsigned int refused;
	_Atomic uint64_t collectives;
	struct nccl_peers *_Atomic peers; /* created at the first send or receive */
	_Atomic pid_t users[USERS];

	uint64_t id; /* the same on every member; together with `rank` unique in the process */
	enum nccl_kind kind;
	ncclConfig_t *config; /* a copy of the config that it was created with; NULL: none */
	_Atomic uint64_t splits;
	_Atomic bool finalized;
	_Atomic bool initialising; /* non-blocking, not yet seen ready */
	_Atomic int doomed; /* ended by the application while the worker has it: 1 destroy, 2 abort */
	struct nccl_registration *registrations; /* under the lock */
	struct nccl_comm *next_unused;
	int32_t trial[2]; /* buffer of the all-reduce that tests it, without device memory */
};

/* What is kept of an ended communicator: its counts, which the other members must still reach. */
struct nccl_ended {
	uint64_t id, collectives;
	int nranks, rank;
	bool aborted;
	struct nccl_peers *peers;
};

/* The record of a handle; NULL for a handle that is not ours. The record of a stale handle is UNUSED. */
struct nccl_comm *comm_of(uint64_t handle);

/* A new PENDING record with an unused id; NULL: no room. nranks and rank may be -1. Takes ownership of `config`. */
struct nccl_comm *comm_make(uint64_t id, enum nccl_kind kind, int nranks, int rank, ncclConfig_t *config);
/* Records its counts as those of an ended communicator, and frees the record. */
void comm_end(struct nccl_comm *comm, bool aborted);
/* Gets size, rank and device from the real communicator where they are not known. */
void comm_learn(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance);

/* Records by number, for iteration; NULL after the last that was ever used. */
struct nccl_comm *comm_at(size_t number);
/* The ended ones, the oldest first. With the lock. */
const struct nccl_ended *ended_at(size_t number);

struct nccl_peers *comm_peers(struct nccl_comm *comm); /* NULL: no memory or size unknown */
void comm_note_user(struct nccl_comm *comm, pid_t tid);

static inline bool comm_blocks(const struct nccl_comm *comm)
{
	return !comm->config || comm->config->blocking != 0;
}

/* Deep copy, of the size that the struct itself states; NULL for NULL, or if there is no memory. */
ncclConfig_t *config_copy(const ncclConfig_t *config);

uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t length);

#endif
