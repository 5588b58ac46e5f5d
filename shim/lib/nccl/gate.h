/* The gate in front of every operation. Open, it counts operations. Closed, it blocks those beyond their targets. */
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

/* Lets a thread (0: any) launch whatever comes next while the channel is below `until.count`, and as long as fewer than
 * `passed` groups have passed the closed gate. */
struct gate_permission {
	pid_t thread;
	struct gate_target until;
	uint64_t passed;
};

/* Waits until all the calls may be launched, counts them, and sets the thread to CALLING. An error: they never may be. */
ncclResult_t gate_pass(struct nccl_thread *thread, const struct nccl_call *calls, size_t count);
/* Counts one operation on an open gate; the thread is DECIDING. */
void gate_count(struct nccl_thread *thread, struct nccl_comm *comm, const struct nccl_shape *shape, const uint64_t *word);

/* Calls `visit` with each channel of the call and how much it adds there. */
void gate_channels(const struct nccl_call *call,
		   void (*visit)(void *context, struct nccl_comm *comm, enum gate_channel channel, int peer, uint64_t count),
		   void *context);

/* Commands are numbered. Each runs on its own thread, so one that was given up may come after the next one, which it must not
 * undo: then these three do nothing, and return false (gate_open: ECANCELED). */
/* Later launches wait at the gate. When this returns, every earlier launch is counted. */
bool gate_close(uint64_t command);
/* Sets the count that each channel may reach; a channel without a target is never below it. Replaces all earlier targets and
 * permissions, and takes ownership of both arrays. */
bool gate_set_targets(uint64_t command, struct gate_target *targets, size_t targets_count,
		      struct gate_permission *permissions, size_t permissions_count);
/* 0 or an errno. EBUSY: a communicator, whose id is in *missing, is not attached, and the gate stays closed. `abandon`: it
 * never will be, because a member has ended. The gate opens, and operations on it return errors. */
int gate_open(uint64_t command, bool abandon, uint64_t *missing);
/* How many groups have passed the closed gate. */
uint64_t gate_passed(void);
/* Whether no thread is inside the real library; `reason` names one that is. */
bool gate_is_drained(char *reason, size_t room);

#endif
