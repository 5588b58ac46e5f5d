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
	/* DECIDING: has begun to look at the gate and may still count. CALLING: what it launches is counted, the real
	 * library may be inside. The store of DECIDING or CALLING comes before the look at the gate or at a real handle,
	 * both sequentially consistent: a thread that closes the gate or takes a handle away, and looks here afterwards, sees
	 * this thread, or the thread sees the closed gate or the missing handle. */
	_Atomic int calling;
	const char *_Atomic function; /* while CALLING */
	struct nccl_thread *next;
	_Atomic pid_t tid;

	/* This thread's own. */
	int depth; /* of ncclGroupStart */
	ncclResult_t group_result; /* of a call inside the group that could not be kept */
	struct nccl_call *calls; /* kept since the outermost ncclGroupStart */
	size_t count, room;
	char words[256]; /* why the shim itself answered an error; "" after anything else */

	/* Under the lock: what it wants to launch, while it waits at the gate. */
	const struct nccl_call *held;
	size_t held_count;
};

/* The calling thread's; made at its first call. */
static inline struct nccl_thread *thread_self(void);

extern _Thread_local struct nccl_thread *nccl_thread_of_mine __attribute__((tls_model("initial-exec")));
struct nccl_thread *thread_make(void);

static inline struct nccl_thread *thread_self(void)
{
	return __builtin_expect(nccl_thread_of_mine != NULL, 1) ? nccl_thread_of_mine : thread_make();
}

/* The first of all; `next` leads on. Records of ended threads stay, with tid 0, and are used again. */
struct nccl_thread *thread_first(void);

/* Records why the shim answers `result`, for ncclGetLastError, and returns it. */
ncclResult_t thread_error(struct nccl_thread *thread, ncclResult_t result, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* Threads that are held at the gate: what to wait for, read with the lock; the wait, without it; and, with it, the end of
 * the wait. */
uint32_t held_turn(void);
void held_wait(uint32_t seen);
void held_look_again(void);

/* The one lock. All signals are blocked while it is held, so no thread that is parked in a handler ever holds it. */
void nccl_lock(uint64_t *before);
void nccl_unlock(const uint64_t *before);

#endif
