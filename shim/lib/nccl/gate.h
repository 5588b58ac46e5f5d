/* The gate before every operation: open, it counts; closed, it holds what the targets do not let pass. */
#ifndef SNAPSHIM_NCCL_GATE_H
#define SNAPSHIM_NCCL_GATE_H

#include "calls.h"

enum { GATE_OPEN = 0, GATE_CLOSED = 1 };
extern _Atomic int gate_word;

/* A channel: the collectives of a communicator, or its sends to, or receives from, one peer. */
enum gate_channel { CHANNEL_COLLECTIVES = 'c', CHANNEL_SENT = 's', CHANNEL_RECEIVED = 'r' };

struct gate_target {
	uint64_t id;
	enum gate_channel channel;
	int peer;
	uint64_t count;
};

/* Waits until all of it may be launched; then it is counted and the thread is CALLING. An error: it will never be. */
ncclResult_t gate_pass(struct nccl_thread *thread, const struct nccl_call *calls, size_t count);
/* Counts one operation on an open gate; the thread is DECIDING. */
void gate_count(struct nccl_thread *thread, struct nccl_comm *comm, const struct nccl_shape *shape, const uint64_t *word);

/* Calls `visit` with each channel of the call and how much it adds there. */
void gate_channels(const struct nccl_call *call,
		   void (*visit)(void *context, struct nccl_comm *comm, enum gate_channel channel, int peer, uint64_t count),
		   void *context);

/* Every launch after this is held, and everything launched before is counted when this returns. */
void gate_close(void);
/* How far each channel may go; one that is not named stays where it is. Takes the array. */
void gate_set_targets(struct gate_target *targets, size_t count);
void gate_open(void);
/* Whether no thread is inside the real library; `words` describes one that is. */
bool gate_is_drained(char *words, size_t room);

#endif
