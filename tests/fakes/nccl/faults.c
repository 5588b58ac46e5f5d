/* Faults on demand: FAKE_NCCL_FAULT, and the file that FAKE_NCCL_FAULT_FILE names, read again at every call.
 *
 * Each holds entries "point:rank:count:action" separated by commas or white space. Point: a call in lower case without
 * "nccl" and "Comm" (getuniqueid, init, split, shrink, finalize, destroy, abort, allreduce, send, …), or an operation
 * with ".run" (allreduce.run) for the moment when it is executed, or allreduce.send for the moment when the rank has its
 * own part of the result and has not sent it. Rank: a number or *. Count: which time the point is passed since the entry
 * was first seen (1, 2, …), or * for always. Action: hang, slow (half a second), crash (SIGKILL), fail (ncclSystemError),
 * fail-remote, fail-internal, fail-cuda, fail-usage.
 *
 * Invariant: an entry that cannot be parsed aborts the process, because a test whose fault silently does not happen
 * cannot fail. A hang ends when its entry is removed from the file.
 */
#define _GNU_SOURCE
#include "faults.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "communicator.h"
#include "errors.h"

#define TEXT_BYTES 4096
#define ENTRY_BYTES 128
#define LOOK_AGAIN_MS 5
#define SLOW_MS 500
#define ALWAYS (-1)

struct fault {
	char point[48];
	char action[24];
	int rank;
	long count;
};

/* How often an entry's point was passed. Reset when the entry is removed. */
struct counter {
	struct counter *next;
	char entry[ENTRY_BYTES];
	int rank;
	long passed;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct counter *counters;

static const struct {
	const char *action;
	ncclResult_t result;
} failures[] = {
	{"fail", ncclSystemError},
	{"fail-remote", ncclRemoteError},
	{"fail-internal", ncclInternalError},
	{"fail-cuda", ncclUnhandledCudaError},
	{"fail-usage", ncclInvalidUsage},
};

static void parse(const char *entry, struct fault *fault)
{
	char rank[16], count[16], rest;
	bool known = false;
	size_t i;

	if (sscanf(entry, "%47[^:]:%15[0-9*]:%15[0-9*]:%23[a-z-]%c", fault->point, rank, count, fault->action, &rest) == 4) {
		known = !strcmp(fault->action, "hang") || !strcmp(fault->action, "slow") || !strcmp(fault->action, "crash");
		for (i = 0; i < sizeof(failures) / sizeof(*failures); i++)
			known = known || !strcmp(fault->action, failures[i].action);
		fault->rank = *rank == '*' ? ALWAYS : atoi(rank);
		fault->count = *count == '*' ? ALWAYS : atol(count);
	}
	if (!known) {
		fprintf(stderr, "libnccl stand-in: the fault '%s' is not point:rank:count:action\n", entry);
		abort();
	}
}

static void read_wishes(char *text)
{
	const char *given = getenv("FAKE_NCCL_FAULT"), *path = getenv("FAKE_NCCL_FAULT_FILE");
	size_t used = (size_t)snprintf(text, TEXT_BYTES, "%s ", given ? given : "");
	int fd = path && used < TEXT_BYTES ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	ssize_t got;

	if (fd < 0)
		return;
	while (used < TEXT_BYTES - 1 && (got = read(fd, text + used, TEXT_BYTES - 1 - used)) > 0)
		used += (size_t)got;
	text[used] = 0;
	close(fd);
}

static bool wished(const char *entry)
{
	char text[TEXT_BYTES], *rest, *word;

	read_wishes(text);
	for (word = strtok_r(text, ", \t\n", &rest); word; word = strtok_r(NULL, ", \t\n", &rest))
		if (!strcmp(word, entry))
			return true;
	return false;
}

static void forget_unwished(void)
{
	struct counter **place = &counters, *gone;

	while (*place) {
		if (wished((*place)->entry)) {
			place = &(*place)->next;
			continue;
		}
		gone = *place;
		*place = gone->next;
		free(gone);
	}
}

static long pass(const char *entry, int rank)
{
	struct counter *counter;

	for (counter = counters; counter; counter = counter->next)
		if (counter->rank == rank && !strcmp(counter->entry, entry))
			return ++counter->passed;
	counter = calloc(1, sizeof(*counter));
	if (!counter)
		abort();
	snprintf(counter->entry, sizeof(counter->entry), "%s", entry);
	counter->rank = rank;
	counter->next = counters;
	counters = counter;
	return ++counter->passed;
}

/* The first entry that is due now, in `entry`. */
static bool due(const char *point, int rank, char *entry, struct fault *fault)
{
	char text[TEXT_BYTES], *rest, *word;
	bool found = false;

	read_wishes(text);
	pthread_mutex_lock(&lock);
	forget_unwished();
	for (word = strtok_r(text, ", \t\n", &rest); word; word = strtok_r(NULL, ", \t\n", &rest)) {
		struct fault read;
		long passed;

		parse(word, &read);
		if (strcmp(read.point, point) != 0 || (read.rank != ALWAYS && read.rank != rank))
			continue;
		passed = pass(word, rank);
		if (found || (read.count != ALWAYS && read.count != passed))
			continue;
		found = true;
		*fault = read;
		snprintf(entry, ENTRY_BYTES, "%s", word);
	}
	pthread_mutex_unlock(&lock);
	return found;
}

ncclResult_t fault_at(const char *point, int rank, const struct ncclComm *comm)
{
	const struct timespec pause = {.tv_nsec = LOOK_AGAIN_MS * 1000000}, slow = {.tv_nsec = SLOW_MS * 1000000};
	char entry[ENTRY_BYTES];
	struct fault fault;
	size_t i;

	if (!getenv("FAKE_NCCL_FAULT") && !getenv("FAKE_NCCL_FAULT_FILE"))
		return ncclSuccess;
	if (!due(point, rank, entry, &fault))
		return ncclSuccess;
	if (!strcmp(fault.action, "crash"))
		kill(getpid(), SIGKILL);
	if (!strcmp(fault.action, "slow")) {
		nanosleep(&slow, NULL);
		return ncclSuccess;
	}
	if (!strcmp(fault.action, "hang")) {
		while (wished(entry)) {
			if (comm && atomic_load(&comm->stopped))
				return failed(ncclInternalError, "aborted while it hung at %s, as asked for", point);
			nanosleep(&pause, NULL);
		}
		return ncclSuccess;
	}
	for (i = 0; i < sizeof(failures) / sizeof(*failures) - 1; i++)
		if (!strcmp(fault.action, failures[i].action))
			break;
	return failed(failures[i].result, "failed at %s, as asked for by '%s'", point, entry);
}

ncclResult_t fault_running(const char *name, int rank, const struct ncclComm *comm)
{
	char point[48];

	snprintf(point, sizeof(point), "%s.run", name);
	return fault_at(point, rank, comm);
}
