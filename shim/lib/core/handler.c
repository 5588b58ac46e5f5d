/* The job's side of parking: what a thread does when it gets the reserved signal.
 *
 * It runs in the signal handler, possibly on a small stack, while other threads may hold any lock. So it does not allocate
 * and makes no libc call that locks. The state is plain memory and one futex, so that it is valid before a dump and after a
 * restore, where the thread ids are the same in the new pid namespace.
 */
#define _GNU_SOURCE
#include "parking.h"

struct parking parking;

/* A signal that arrives late finds `closed` 0 and returns. */
void park_here(const void *context)
{
	int tid = self_tid();
	enum place place;
	bool busy;
	int *entry;

	if (!LOAD(&parking.closed))
		return;
	place = place_in(context);
	busy = place == PLACE_DRIVER ||
	       (LOAD(&parking.outside_driver) && (place == PLACE_DRIVER_SLEEPS || memory_call_open()));
	if (busy || (place == PLACE_DOUBTFUL && LOAD(&parking.patient))) {
		if (busy)
			STORE(&parking.in_driver, 1);
		entry = parking_find(parking.signalled, tid);
		if (entry)
			STORE(entry, 0); /* the signal is sent again a moment later */
		return;
	}
	/* Counted before `closed` is read again: either this thread sees that the control thread has cleared it, or the
	 * control thread sees the count and waits until this thread has left. Otherwise a thread that enters late could run
	 * while its entry marks it as parked. */
	__atomic_add_fetch(&parking.waiting, 1, __ATOMIC_SEQ_CST);
	/* The table cannot be full, because the control thread counts threads before it signals them. Without an entry the
	 * thread counts as not parked. */
	entry = __atomic_load_n(&parking.closed, __ATOMIC_SEQ_CST) ? parking_claim(parking.parked, tid) : NULL;
	if (entry) {
		while (LOAD(&parking.closed))
			wait_word(&parking.closed, 1, FOREVER);
		STORE(entry, 0);
	}
	__atomic_sub_fetch(&parking.waiting, 1, __ATOMIC_SEQ_CST);
}
