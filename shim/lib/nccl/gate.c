/* The gate: counts operations and, while it is closed, blocks those beyond the cut.
 *
 * Open, it costs one load and one relaxed addition. Closed, a thread publishes what it wants to launch and sleeps until one
 * of its channels is below its target. Then another member is already committed to that operation, and the whole group is
 * inside the cut with all its channels. A permission lets it pass with any group, because an operation that the process lacks
 * comes later in its program (migrator/quiesce/cut.py has the same rules, and the reasons). A thread sleeps at group depth 0 of the real library and holds no lock. `calling` (threads.h) orders counting and closing: after gate_close
 * no operation is launched that was not counted.
 */
#define _GNU_SOURCE
#include "gate.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/shim.h"

_Atomic int gate_word = GATE_OPEN;
static struct gate_target *targets; /* sorted; under the lock */
static size_t targets_count;
static struct gate_permission *permissions; /* under the lock */
static size_t permissions_count;
static _Atomic uint64_t passed; /* groups that have passed the closed gate; written under the lock */
static uint64_t last_command; /* that changed the gate; under the lock */

static void count_peer(struct nccl_comm *comm, bool sent, int peer, uint64_t count)
{
	struct nccl_peers *peers = comm_peers(comm);

	/* NCCL itself reports a peer that does not exist. What a rank sends to itself counts as sent, and only once. */
	if (!peers || peer < 0 || peer >= peers->ranks || (!sent && peer == atomic_load(&comm->rank)))
		return;
	atomic_fetch_add_explicit(sent ? &peers->with[peer].sent : &peers->with[peer].received, count, memory_order_relaxed);
}

void gate_count(struct nccl_thread *thread, struct nccl_comm *comm, const struct nccl_shape *shape, const uint64_t *word)
{
	pid_t tid = atomic_load_explicit(&thread->tid, memory_order_relaxed);

	if (__builtin_expect(atomic_load_explicit(&comm->users[0], memory_order_relaxed) != tid, 0))
		comm_note_user(comm, tid);
	if (shape->counts == COLLECTIVE)
		atomic_fetch_add_explicit(&comm->collectives, 1, memory_order_relaxed);
	else
		count_peer(comm, shape->counts == SEND, (int)word[(int)shape->peer], 1);
}

void gate_channels(const struct nccl_call *call,
		   void (*visit)(void *context, struct nccl_comm *comm, enum gate_channel channel, int peer, uint64_t count),
		   void *context)
{
	int place = nccl_shapes[call->symbol].peer, peer = place >= 0 ? (int)call->word[place] : -1;
	const ncclWaitSignalDesc_t *waits = (const void *)(uintptr_t)call->word[1];

	if (call->comm && (call->counts == COLLECTIVE || call->counts == CREATION_OF_PARENT))
		visit(context, call->comm, CHANNEL_COLLECTIVES, -1, 1);
	if (call->comm && (call->counts == SEND || call->counts == SIGNAL))
		visit(context, call->comm, CHANNEL_SENT, peer, 1);
	if (call->comm && call->counts == RECEIVE && peer != atomic_load(&call->comm->rank))
		visit(context, call->comm, CHANNEL_RECEIVED, peer, 1);
	if (call->comm && call->counts == WAIT_SIGNAL)
		for (int i = 0; i < (int)call->word[0]; i++)
			visit(context, call->comm, CHANNEL_RECEIVED, waits[i].peer, (uint64_t)waits[i].operations);
	for (int i = 0; i < call->children; i++)
		visit(context, call->child[i], CHANNEL_COLLECTIVES, -1, 1);
}

static void count_channel(void *context, struct nccl_comm *comm, enum gate_channel channel, int peer, uint64_t count)
{
	comm_note_user(comm, *(pid_t *)context);
	if (channel == CHANNEL_COLLECTIVES)
		atomic_fetch_add_explicit(&comm->collectives, count, memory_order_relaxed);
	else
		count_peer(comm, channel == CHANNEL_SENT, peer, count);
}

static void count_all(struct nccl_thread *thread, const struct nccl_call *calls, size_t count)
{
	pid_t tid = atomic_load(&thread->tid);

	for (size_t i = 0; i < count; i++)
		gate_channels(&calls[i], count_channel, &tid);
	atomic_store_explicit(&thread->calling, CALLING, memory_order_release);
}

static int compare(const void *a, const void *b)
{
	const struct gate_target *left = a, *right = b;

	if (left->id != right->id)
		return left->id < right->id ? -1 : 1;
	if (left->channel != right->channel)
		return left->channel < right->channel ? -1 : 1;
	return left->peer < right->peer ? -1 : left->peer > right->peer;
}

struct look {
	bool any, below;
};

static uint64_t launched_on(struct nccl_comm *comm, enum gate_channel channel, int peer)
{
	struct nccl_peers *peers = channel == CHANNEL_COLLECTIVES ? NULL : atomic_load(&comm->peers);

	if (channel == CHANNEL_COLLECTIVES)
		return atomic_load(&comm->collectives);
	if (!peers || peer < 0 || peer >= peers->ranks)
		return 0;
	return atomic_load(channel == CHANNEL_SENT ? &peers->with[peer].sent : &peers->with[peer].received);
}

static void look_at_channel(void *context, struct nccl_comm *comm, enum gate_channel channel, int peer, uint64_t count)
{
	struct gate_target wanted = {.id = comm->id, .channel = channel, .peer = peer}, *target;
	struct look *look = context;
	uint64_t launched = launched_on(comm, channel, peer);

	(void)count;
	look->any = true;
	target = targets_count ? bsearch(&wanted, targets, targets_count, sizeof(*targets), compare) : NULL;
	look->below = look->below || (target && launched < target->count);
}

/* Whether the channel is below the count on one of this process's memberships. A communicator that has ended is not. */
static bool is_below(const struct gate_target *until)
{
	struct nccl_comm *comm;

	for (size_t i = 0; (comm = comm_at(i)); i++) {
		int state = atomic_load(&comm->state);

		if (comm->id == until->id && (state == LIVE || state == PENDING) &&
		    launched_on(comm, until->channel, until->peer) < until->count)
			return true;
	}
	return false;
}

static bool is_permitted(pid_t thread)
{
	for (size_t i = 0; i < permissions_count; i++)
		if ((!permissions[i].thread || permissions[i].thread == thread) &&
		    atomic_load(&passed) < permissions[i].passed && is_below(&permissions[i].until))
			return true;
	return false;
}

/* 1: may pass; 0: waits; -1: one of its communicators has ended or, on an open gate, is not attached. Needs the lock. */
static int decide(const struct nccl_thread *thread, const struct nccl_call *calls, size_t count)
{
	bool open = atomic_load(&gate_word) == GATE_OPEN;
	struct look look = {false, open};

	for (size_t i = 0; i < count; i++) {
		int state = calls[i].comm ? atomic_load(&calls[i].comm->state) : LIVE;

		if (state == UNUSED || state == ENDING || state == LOST)
			return calls[i].counts == NOTHING ? 1 : -1;
		gate_channels(&calls[i], look_at_channel, &look);
		if (state != LIVE && state != PENDING && calls[i].counts != NOTHING)
			return open ? -1 : 0;
	}
	return !look.any || look.below || is_permitted(atomic_load(&thread->tid));
}

static ncclResult_t wait_for_turn(struct nccl_thread *thread, const struct nccl_call *calls, size_t count)
{
	uint32_t seen;
	uint64_t before;
	int decision;

	nccl_lock(&before);
	while ((decision = decide(thread, calls, count)) == 0) {
		thread->held = calls;
		thread->held_count = count;
		seen = held_turn();
		nccl_unlock(&before);
		held_wait(seen);
		nccl_lock(&before);
	}
	thread->held = NULL;
	if (decision > 0) {
		count_all(thread, calls, count);
		atomic_fetch_add(&passed, atomic_load(&gate_word) == GATE_CLOSED);
	}
	nccl_unlock(&before);
	for (size_t i = 0; decision < 0 && i < count; i++)
		if (calls[i].comm && atomic_load(&calls[i].comm->state) != LIVE)
			return answer_gone(thread, calls[i].comm, calls[i].symbol);
	return decision > 0 ? ncclSuccess : ncclSystemError;
}

ncclResult_t gate_pass(struct nccl_thread *thread, const struct nccl_call *calls, size_t count)
{
	atomic_store_explicit(&thread->function, nccl_symbol_names[calls[0].symbol], memory_order_relaxed);
	atomic_store(&thread->calling, DECIDING);
	if (atomic_load(&gate_word) == GATE_OPEN) {
		count_all(thread, calls, count);
		return ncclSuccess;
	}
	atomic_store_explicit(&thread->calling, OUTSIDE, memory_order_release);
	return wait_for_turn(thread, calls, count);
}

/* Under the lock: whether no later command has changed the gate. */
static bool is_latest(uint64_t command)
{
	if (command < last_command)
		return false;
	last_command = command;
	return true;
}

bool gate_close(uint64_t command)
{
	struct nccl_thread *thread;
	uint64_t before;
	bool latest;

	nccl_lock(&before);
	latest = is_latest(command);
	if (latest)
		atomic_store(&gate_word, GATE_CLOSED);
	nccl_unlock(&before);
	if (!latest)
		return false;
	for (thread = thread_first(); thread; thread = thread->next)
		while (atomic_load(&thread->calling) == DECIDING)
			sched_yield(); /* some instructions, at most a real ncclCommCount */
	return true;
}

static void replace_targets(struct gate_target *fresh, size_t count, struct gate_permission *allowed, size_t allowed_count)
{
	free(targets);
	free(permissions);
	targets = fresh;
	targets_count = count;
	permissions = allowed;
	permissions_count = allowed_count;
}

bool gate_set_targets(uint64_t command, struct gate_target *fresh, size_t count, struct gate_permission *allowed,
		      size_t allowed_count)
{
	uint64_t before;
	bool latest;

	qsort(fresh, count, sizeof(*fresh), compare);
	nccl_lock(&before);
	latest = is_latest(command);
	if (latest) {
		replace_targets(fresh, count, allowed, allowed_count);
		held_look_again();
	}
	nccl_unlock(&before);
	if (!latest) {
		free(fresh);
		free(allowed);
	}
	return latest;
}

uint64_t gate_passed(void)
{
	return atomic_load(&passed);
}

/* Under the lock: whether a communicator is down, or on its way down or up. */
static bool is_missing(const struct nccl_comm *comm)
{
	int state = atomic_load(&comm->state);

	return state == DETACHED || state == DETACHING || state == ATTACHING;
}

int gate_open(uint64_t command, bool abandon, uint64_t *missing)
{
	struct nccl_comm *comm;
	uint64_t before;
	int status = 0;

	nccl_lock(&before);
	if (!is_latest(command))
		status = ECANCELED;
	for (size_t i = 0; !status && !abandon && (comm = comm_at(i)); i++)
		if (is_missing(comm)) {
			*missing = comm->id;
			status = EBUSY;
		}
	if (!status) {
		for (size_t i = 0; (comm = comm_at(i)); i++) {
			int detached = DETACHED;

			atomic_compare_exchange_strong(&comm->state, &detached, LOST);
		}
		replace_targets(NULL, 0, NULL, 0);
		atomic_store(&gate_word, GATE_OPEN);
		held_look_again();
	}
	nccl_unlock(&before);
	return status;
}

bool gate_is_drained(char *reason, size_t room)
{
	for (struct nccl_thread *thread = thread_first(); thread; thread = thread->next)
		if (atomic_load(&thread->calling) != OUTSIDE) {
			snprintf(reason, room, "thread %d is still inside %s", atomic_load(&thread->tid),
				 atomic_load(&thread->function));
			return false;
		}
	return true;
}
