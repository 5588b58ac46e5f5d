/* The driver's lock, as a program's calls meet it.
 *
 * What was seen in a real process (r580, with a debugger): while it is locked a launch waits in pthread_rwlock_rdlock. Which calls
 * want that lock alone was concluded from those that hung. glibc counts a reader before it sleeps: so whoever waits when it is
 * opened has a share from then on, also a thread that stands in a signal handler and cannot know. Copies and launches pass such
 * a share; what wants the lock alone (freeing pinned memory, destroying a stream, the next lock) waits until its owner has run.
 * Here a share counts until its owner runs on: a call that waits for work holds nobody up.
 *
 * Invariant: every thread that waits is counted once, in `waiting` or in `handed`, from before it sleeps until it is inside. Two
 * words and a futex, no lock of libc's: a thread may be parked in a signal handler anywhere here.
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
	uint32_t turns;   /* how often it was shut or opened, odd: it is shut. Who waits sleeps on it */
	uint16_t waiting; /* for the next opening */
	uint16_t handed;  /* shares of those that waited at an opening and have not run since */
};

static _Atomic struct gate gate;
static _Atomic uint32_t inside;

static bool is_shut(struct gate now)
{
	return now.turns % 2;
}

/* It returns for a signal, too. */
static void sleep_until_it_turns(struct gate now)
{
	syscall(SYS_futex, &gate, FUTEX_WAIT_PRIVATE, now.turns, NULL, NULL, 0);
}

static bool turned_since(struct gate then)
{
	struct gate now = gate;

	return now.turns != then.turns;
}

/* However often it was shut and opened before the owner runs, the share is this one. Inside first: see gate_nobody_inside. */
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

/* Not counted while it waits: nobody hands it a share. */
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

/* All at once: there is no moment at which somebody neither waits nor has a share. */
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

/* Shares first: whoever gives one up in between is inside by then. */
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
