/* The streams of the fake devices. Invariant: a stream's work runs in the order of its tickets, regardless of the
 * communicator or copy of libnccl that it belongs to. An empty stream uses no memory.
 */
#define _GNU_SOURCE
#include "streams.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#define BUSY 7 /* ncclInProgress */
#define DEFAULT_STREAMS 3
#define NOT_CHOSEN (-1)

struct fake_ticket {
	struct fake_ticket *next;
	int device;
	void *stream;
	const void *unit;
	uint64_t number;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct fake_ticket *tickets; /* of all streams, oldest first */
static uint64_t numbers;
static __thread int chosen_device = NOT_CHOSEN;

static bool same_stream(const struct fake_ticket *ticket, int device, const void *stream)
{
	/* A handle already implies its device; a test may use it from any device. */
	return ticket->stream == stream && ((uintptr_t)stream >= DEFAULT_STREAMS || ticket->device == device);
}

int fakeNcclSetDevice(int device)
{
	chosen_device = device;
	return 0;
}

int fakeNcclGetDevice(void)
{
	int (*ask)(int *) = dlsym(RTLD_DEFAULT, "cuCtxGetDevice");
	int device = 0;

	if (chosen_device != NOT_CHOSEN)
		return chosen_device;
	return ask && ask(&device) == 0 ? device : 0;
}

int fakeNcclChosenDevice(void)
{
	return chosen_device;
}

struct fake_ticket *fakeNcclTicketTake(int device, void *stream, const void *unit)
{
	struct fake_ticket *ticket = calloc(1, sizeof(*ticket)), **end;

	if (!ticket)
		return NULL;
	ticket->device = device;
	ticket->stream = stream;
	ticket->unit = unit;
	pthread_mutex_lock(&lock);
	ticket->number = ++numbers;
	for (end = &tickets; *end; end = &(*end)->next)
		;
	*end = ticket;
	pthread_mutex_unlock(&lock);
	return ticket;
}

static bool has_its_turn(const struct fake_ticket *ticket)
{
	const struct fake_ticket *ahead;

	for (ahead = tickets; ahead != ticket; ahead = ahead->next)
		if (same_stream(ahead, ticket->device, ticket->stream) && ahead->unit != ticket->unit)
			return false;
	return true;
}

int fakeNcclTicketAwait(struct fake_ticket *ticket, const atomic_bool *cancelled)
{
	bool turn;

	pthread_mutex_lock(&lock);
	while (!(turn = has_its_turn(ticket)) && !atomic_load(cancelled))
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
	return turn;
}

void fakeNcclTicketLeave(struct fake_ticket *ticket)
{
	struct fake_ticket **place;

	pthread_mutex_lock(&lock);
	for (place = &tickets; *place != ticket; place = &(*place)->next)
		;
	*place = ticket->next;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	free(ticket);
}

void fakeNcclTicketsWake(void)
{
	pthread_mutex_lock(&lock);
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

static bool holds_work(int device, const void *stream, uint64_t up_to)
{
	const struct fake_ticket *ticket;

	for (ticket = tickets; ticket; ticket = ticket->next)
		if (ticket->number <= up_to && same_stream(ticket, device, stream))
			return true;
	return false;
}

int fakeNcclStreamSynchronize(void *stream)
{
	int device = fakeNcclGetDevice();
	uint64_t up_to;

	pthread_mutex_lock(&lock);
	up_to = numbers; /* what is launched later is not waited for */
	while (holds_work(device, stream, up_to))
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
	return 0;
}

int fakeNcclStreamQuery(void *stream)
{
	int device = fakeNcclGetDevice();
	bool busy;

	pthread_mutex_lock(&lock);
	busy = holds_work(device, stream, numbers);
	pthread_mutex_unlock(&lock);
	return busy ? BUSY : 0;
}
