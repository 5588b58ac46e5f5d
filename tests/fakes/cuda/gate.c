/* The driver's lock, as seen by the calls of a program.
 *
 * Observed in a real process (r580, with a debugger): while it is locked, a launch waits in pthread_rwlock_rdlock.
 * Which calls need that lock exclusively was concluded from the calls that hung. glibc counts a reader before it
 * sleeps. So when the lock is released, every waiting thread holds a read lock ("share"), even one that is parked in a
 * signal handler and has not noticed. Copies and launches are not blocked by such a share. Calls that need the lock
 * exclusively (freeing pinned memory, destroying a stream, the next lock) wait until the thread has run. Here a share
 * counts only until its thread continues, so a call that waits for work on the GPU blocks no other.
 *
 * Invariant: every waiting thread is counted once, in `waiting` or in `handed`, from before it sleeps until it is
 * inside. The gate uses atomics and a futex, but no lock of libc, because a thread may be parked in a signal handler
 * anywhere here.
 */
#define _GNU_SOURCE
#include "gate.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "process.h"

struct gate {
	uint32_t turns;   /* number of times it was shut or opened; odd: it is shut. Futex of waiting threads */
	uint16_t waiting; /* threads that wait until it opens */
	uint16_t handed;  /* threads that waited when it opened and have not run since */
};

static _Atomic struct gate gate;
static _Atomic uint32_t inside;

static bool is_shut(struct gate now)
{
	return now.turns % 2;
}

/* Also returns after a signal. */
static void sleep_until_it_turns(struct gate now)
{
	syscall(SYS_futex, &gate, FUTEX_WAIT_PRIVATE, now.turns, NULL, NULL, 0);
}

static bool turned_since(struct gate then)
{
	struct gate now = gate;

	return now.turns != then.turns;
}

/* Uses the share of this thread, even if the gate was shut and opened since. `inside` comes first: see gate_nobody_inside. */
static void use_share(void)
{
	struct gate now = gate, then;

	inside++;
	do {
		then = now;
		then.handed--;
	} while (!atomic_compare_exchange_weak(&gate, &now, then));
}

void gate_enter(void)
{
	for (;;) {
		struct gate now = gate, then = now;

		if (is_shut(now)) {
			then.waiting++;
			if (!atomic_compare_exchange_weak(&gate, &now, then))
				continue;
			while (!turned_since(then))
				sleep_until_it_turns(then);
			use_share();
			return;
		}
		inside++;
		now = gate;
		if (!is_shut(now))
			return;
		inside--;
	}
}

/* Not counted while it waits, so it gets no share. */
void gate_enter_alone(void)
{
	for (;;) {
		struct gate now = gate;

		if (is_shut(now)) {
			sleep_until_it_turns(now);
			continue;
		}
		if (now.handed) {
			sleep_ms(1);
			continue;
		}
		inside++;
		now = gate;
		if (!is_shut(now) && !now.handed)
			return;
		inside--;
	}
}

void gate_leave(void)
{
	inside--;
}

void gate_shut(void)
{
	struct gate now = gate, then;

	do {
		then = now;
		then.turns += !is_shut(now);
	} while (!atomic_compare_exchange_weak(&gate, &now, then));
}

/* One atomic update, so that a waiting thread is always counted in `waiting` or in `handed`. */
void gate_open(void)
{
	struct gate now = gate, then;

	do {
		then = now;
		then.turns += is_shut(now);
		then.handed = (uint16_t)(then.handed + then.waiting);
		then.waiting = 0;
	} while (!atomic_compare_exchange_weak(&gate, &now, then));
	syscall(SYS_futex, &gate, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Reads `handed` first: a thread that uses its share in between is already counted in `inside`. */
bool gate_nobody_inside(void)
{
	struct gate now = gate;

	return !now.handed && !inside;
}

void gate_forget_after_fork(void)
{
	gate = (struct gate){0};
	inside = 0;
}
