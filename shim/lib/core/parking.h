/* What the two sides of parking share: the signal handler of a job's thread (handler.c) and the control thread (park.c). */
#ifndef SNAPSHIM_PARKING_H
#define SNAPSHIM_PARKING_H

#include <stddef.h>
#include <stdint.h>

#include "shim.h"

#define PARKED_THREADS_MAX 4096

struct parking {
	uint32_t closed;         /* 1: a thread that gets the signal waits in the handler */
	uint32_t outside_driver; /* 1: a thread that sleeps inside the driver is not parked either */
	uint32_t in_driver;      /* 1: in this round a thread was not parked because it was inside the driver */
	uint32_t patient;        /* 1: a thread that may hold a lock is not parked either */
	uint32_t waiting;        /* threads in the handler that hold an entry of `parked`, or are about to take one */
	/* Both are hash tables of thread ids; 0 marks a free entry. */
	int parked[PARKED_THREADS_MAX];    /* a thread writes and clears only its own entry */
	int signalled[PARKED_THREADS_MAX]; /* threads that were sent the signal in this round and have not answered */
};
extern struct parking parking;

static inline int *parking_find(int *table, int tid)
{
	for (unsigned int i = 0; i < PARKED_THREADS_MAX; i++) {
		int *entry = &table[((unsigned int)tid + i) % PARKED_THREADS_MAX];

		if (LOAD(entry) == tid)
			return entry;
	}
	return NULL;
}

static inline int *parking_claim(int *table, int tid)
{
	for (unsigned int i = 0; i < PARKED_THREADS_MAX; i++) {
		int *entry = &table[((unsigned int)tid + i) % PARKED_THREADS_MAX];
		int unused = 0;

		if (SWAP_IF(entry, &unused, tid))
			return entry;
	}
	return NULL;
}

#endif
