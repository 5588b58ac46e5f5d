/* The table of virtual communicators.
 *
 * A handle is the address of a record in one reserved range, so a comparison tells whether it is ours. Records are reused
 * as late as possible, because a watchdog may still query a handle that has just been destroyed.
 *
 * Ids: members must agree on a communicator's id without communicating. A root's is a hash of its unique id; a split's of
 * its parent's id, the number of the split among its parent's, and the color; a shrink's of its parent's id and the
 * excluded ranks. If an id exists already, it is hashed again, which all members do alike.
 */
#define _GNU_SOURCE
#include "communicators.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "abi.h"

#define RECORDS 65536
#define ENDED 4096
#define RESTING 1024 /* free records that are kept before the oldest is reused */

static struct nccl_comm *_Atomic table;
static _Atomic size_t used; /* records that were ever handed out */
static struct snapshim_counts counts = {
	.version = 1,
	.record_bytes = sizeof(struct nccl_comm),
	.at_id = offsetof(struct nccl_comm, id),
	.at_state = offsetof(struct nccl_comm, state),
	.at_nranks = offsetof(struct nccl_comm, nranks),
	.at_rank = offsetof(struct nccl_comm, rank),
	.at_collectives = offsetof(struct nccl_comm, collectives),
	.at_peers = offsetof(struct nccl_comm, peers),
	.at_with = offsetof(struct nccl_peers, with),
	.live = LIVE,
};
static struct nccl_comm *unused_first, *unused_last;
static size_t resting;
static struct nccl_ended ended[ENDED];
static size_t ended_count;

struct nccl_comm *comm_of(uint64_t handle)
{
	uint64_t base = (uint64_t)(uintptr_t)atomic_load_explicit(&table, memory_order_acquire);

	if (!base || handle - base >= RECORDS * sizeof(struct nccl_comm) || (handle - base) % sizeof(struct nccl_comm) != 0)
		return NULL;
	return (struct nccl_comm *)(uintptr_t)handle;
}

uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t length)
{
	const unsigned char *byte = bytes;
	uint64_t hash = seed ^ 0xcbf29ce484222325u;

	for (size_t i = 0; i < length; i++)
		hash = (hash ^ byte[i]) * 0x100000001b3u;
	hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
	hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
	return hash ^ hash >> 32;
}

ncclConfig_t *config_copy(const ncclConfig_t *config)
{
	size_t size = config ? config->size : 0, name_bytes, net_bytes;
	bool named = size >= offsetof(ncclConfig_t, comm_name) + sizeof(char *);
	bool netted = size >= offsetof(ncclConfig_t, net_name) + sizeof(char *);
	ncclConfig_t *copy;
	char *strings;

	/* No version has this size: NCCL gets the caller's struct and reports the error. */
	if (size < offsetof(ncclConfig_t, cga_cluster_size) || size > 65536)
		return NULL;
	net_bytes = netted && config->net_name ? strlen(config->net_name) + 1 : 0;
	name_bytes = named && config->comm_name ? strlen(config->comm_name) + 1 : 0;
	copy = calloc(1, (size > sizeof(*copy) ? size : sizeof(*copy)) + net_bytes + name_bytes);
	if (!copy)
		return NULL;
	memcpy(copy, config, size);
	strings = (char *)copy + (size > sizeof(*copy) ? size : sizeof(*copy));
	if (net_bytes)
		copy->net_name = memcpy(strings, config->net_name, net_bytes);
	if (name_bytes)
		copy->comm_name = memcpy(strings + net_bytes, config->comm_name, name_bytes);
	return copy;
}

static bool id_taken(uint64_t id, int rank)
{
	for (size_t i = 0; i < atomic_load(&used); i++) {
		struct nccl_comm *comm = &table[i];

		if (atomic_load(&comm->state) != UNUSED && comm->id == id && atomic_load(&comm->rank) == rank)
			return true;
	}
	for (size_t i = 0; i < ended_count && i < ENDED; i++)
		if (ended[i].id == id && ended[i].rank == rank)
			return true;
	return false;
}

/* With the lock: tells a daemon that only reads where the records are. */
static void publish(void)
{
	counts.records = (uint64_t)(uintptr_t)atomic_load(&table);
	__atomic_store_n(&counts.used, (uint64_t)atomic_load(&used), __ATOMIC_RELEASE);
	__atomic_store_n(&snapshim_mailbox.counts, (int32_t)((char *)&counts - (char *)&snapshim_mailbox), __ATOMIC_RELEASE);
}

/* With the lock. */
static struct nccl_comm *record(void)
{
	struct nccl_comm *comm = unused_first;

	if (!atomic_load(&table)) {
		void *range = mmap(NULL, RECORDS * sizeof(struct nccl_comm), PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (range == MAP_FAILED)
			return NULL;
		atomic_store_explicit(&table, range, memory_order_release);
	}
	if (resting < RESTING && atomic_load(&used) < RECORDS)
		return &table[atomic_fetch_add(&used, 1)];
	if (comm) {
		resting--;
		unused_first = comm->next_unused;
		if (!unused_first)
			unused_last = NULL;
	}
	return comm;
}

struct nccl_comm *comm_make(uint64_t id, enum nccl_kind kind, int nranks, int rank, ncclConfig_t *config)
{
	struct nccl_comm *comm;
	uint64_t before;

	nccl_lock(&before);
	comm = record();
	if (comm) {
		while (id_taken(id, rank))
			id = hash_bytes(id, "again", 5);
		comm->id = id;
		comm->kind = kind;
		comm->config = config;
		comm->registrations = NULL;
		comm->next_unused = NULL;
		atomic_store(&comm->real, NULL);
		atomic_store(&comm->nranks, nranks);
		atomic_store(&comm->rank, rank);
		atomic_store(&comm->device, -1);
		atomic_store(&comm->refused, kind == BY_GROW ? REFUSED_GROWN : 0);
		atomic_store(&comm->collectives, 0);
		atomic_store(&comm->peers, NULL);
		atomic_store(&comm->splits, 0);
		atomic_store(&comm->finalized, false);
		atomic_store(&comm->initialising, false);
		atomic_store(&comm->doomed, 0);
		for (int i = 0; i < USERS; i++)
			atomic_store(&comm->users[i], 0);
		atomic_store(&comm->state, PENDING);
		publish();
	}
	nccl_unlock(&before);
	if (!comm)
		free(config);
	return comm;
}

void comm_end(struct nccl_comm *comm, bool aborted)
{
	struct nccl_registration *registration, *next;
	struct nccl_ended *last;
	uint64_t before;

	nccl_lock(&before);
	last = &ended[ended_count++ % ENDED];
	free(last->peers);
	*last = (struct nccl_ended){
		comm->id, atomic_load(&comm->collectives),    atomic_load(&comm->nranks), atomic_load(&comm->rank),
		aborted,  atomic_exchange(&comm->peers, NULL)};
	for (registration = comm->registrations; registration; registration = next) {
		next = registration->next;
		free(registration);
	}
	comm->registrations = NULL;
	free(comm->config);
	comm->config = NULL;
	atomic_store(&comm->real, NULL);
	atomic_store(&comm->state, UNUSED);
	held_look_again(); /* a thread that is held on it gets an error */
	if (unused_last)
		unused_last->next_unused = comm;
	else
		unused_first = comm;
	unused_last = comm;
	resting++;
	nccl_unlock(&before);
}

void comm_learn(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance)
{
	typedef ncclResult_t (*ask)(ncclComm_t, int *);
	const struct {
		ask function;
		_Atomic int *into;
	} questions[] = {
		{REAL(instance, ncclCommCount, ask), &comm->nranks},
		{REAL(instance, ncclCommUserRank, ask), &comm->rank},
		{REAL(instance, ncclCommCuDevice, ask), &comm->device},
	};

	for (size_t i = 0; i < sizeof(questions) / sizeof(*questions); i++) {
		int answer = -1;

		if (atomic_load(questions[i].into) < 0 && questions[i].function(real, &answer) == ncclSuccess)
			atomic_store(questions[i].into, answer);
	}
}

struct nccl_comm *comm_at(size_t number)
{
	return number < atomic_load(&used) ? &table[number] : NULL;
}

const struct nccl_ended *ended_at(size_t number)
{
	size_t first = ended_count > ENDED ? ended_count - ENDED : 0;

	return first + number < ended_count ? &ended[(first + number) % ENDED] : NULL;
}

struct nccl_peers *comm_peers(struct nccl_comm *comm)
{
	struct nccl_peers *peers = atomic_load_explicit(&comm->peers, memory_order_acquire), *none = NULL;
	struct nccl_instance *instance = real_instance();
	ncclComm_t real = atomic_load(&comm->real);
	int nranks;

	if (peers)
		return peers;
	if (real && instance)
		comm_learn(comm, real, instance);
	nranks = atomic_load(&comm->nranks);
	peers = nranks > 0 ? calloc(1, sizeof(*peers) + (size_t)nranks * sizeof(peers->with[0])) : NULL;
	if (!peers)
		return NULL;
	peers->ranks = nranks;
	if (atomic_compare_exchange_strong(&comm->peers, &none, peers))
		return peers;
	free(peers);
	return none;
}

void comm_note_user(struct nccl_comm *comm, pid_t tid)
{
	for (int i = 0; i < USERS; i++) {
		pid_t there = atomic_load_explicit(&comm->users[i], memory_order_relaxed);

		if (there == 0 && atomic_compare_exchange_strong(&comm->users[i], &there, tid))
			return;
		if (there == tid)
			return;
	}
}
