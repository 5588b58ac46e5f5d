/* A record of each thread that calls NCCL, and the one lock of the slow paths. */
#ifndef SNAPSHIM_NCCL_THREADS_H
#define SNAPSHIM_NCCL_THREADS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "real.h"

struct nccl_comm;
struct nccl_call;

enum { OUTSIDE = 0, DECIDING = 1, CALLING = 2 };

struct nccl_thread {
	/* DECIDING: the thread checks the gate and may still count. CALLING: what it launches is counted, and it may be
	 * inside the real library. The store of DECIDING or CALLING precedes the load of the gate or of a real handle, both
	 * sequentially consistent. So a thread that closes the gate or removes a handle, and then reads this, sees that this
	 * thread is inside, or this thread sees the closed gate or the missing handle. */
	_Atomic int calling;
	const char *_Atomic function; /* while CALLING */
	struct nccl_thread *next;
	_Atomic pid_t tid;

	/* This thread's own. */
	int depth; /* of ncclGroupStart */
	ncclResult_t group_result; /* of a call inside the group that could not be kept */
	struct nccl_call *calls; /* kept since the outermost ncclGroupStart */
	size_t count, room;
	char message[256]; /* why the shim itself returned an error; "" otherwise */

	/* Under the lock: what it wants to launch, while it waits at the gate. */
	const struct nccl_call *held;
	size_t held_count;
};

/* The calling thread's record, created at its first call. */
static inline struct nccl_thread *thread_self(void);

extern _Thread_local struct nccl_thread *nccl_thread_of_mine __attribute__((tls_model("initial-exec")));
struct nccl_thread *thread_make(void);

static inline struct nccl_thread *thread_self(void)
{
	return __builtin_expect(nccl_thread_of_mine != NULL, 1) ? nccl_thread_of_mine : thread_make();
}

/* The head of the list of records. Records of ended threads stay, with tid 0, and are reused. */
struct nccl_thread *thread_first(void);

/* Records why the shim returns `result`, for ncclGetLastError, and returns it. */
ncclResult_t thread_error(struct nccl_thread *thread, ncclResult_t result, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* Waiting at the gate: read held_turn with the lock, pass it to held_wait without the lock. held_look_again, with the lock,
 * ends the wait. */
uint32_t held_turn(void);
void held_wait(uint32_t seen);
void held_look_again(void);

/* The one lock. All signals are blocked while it is held, so no thread that is parked in a handler ever holds it. */
void nccl_lock(uint64_t *before);
void nccl_unlock(const uint64_t *before);

#endif
