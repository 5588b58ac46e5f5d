#define _GNU_SOURCE
#include "attempt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"

static bool unhex(const char *text, ncclUniqueId *id)
{
	if (strlen(text) != 2 * sizeof(*id))
		return false;
	for (size_t i = 0; i < sizeof(*id); i++) {
		unsigned int byte;

		if (sscanf(text + 2 * i, "%2x", &byte) != 1)
			return false;
		id->internal[i] = (char)byte;
	}
	return true;
}

/* Adds the members of one communicator. A communicator that is not detached here is skipped. */
static int take(struct nccl_job *job, struct attempt *attempt, size_t room, uint64_t id, const ncclUniqueId *unique, bool try)
{
	size_t first = attempt->count;
	struct nccl_comm *comm;

	for (size_t i = 0; (comm = comm_at(i)); i++) {
		int detached = DETACHED;

		if (comm->id != id)
			continue;
		if (attempt->count == room)
			return job_fails(job, EAGAIN, "communicators came while they were being attached");
		if (atomic_load(&comm->nranks) < 1 || atomic_load(&comm->rank) < 0)
			continue; /* never was ready */
		if (!atomic_compare_exchange_strong(&comm->state, &detached, ATTACHING))
			continue;
		attempt->members[attempt->count].comm = comm;
		attempt->members[attempt->count].id = *unique;
		attempt->members[attempt->count++].to_be_tried = try;
	}
	if (try && attempt->count > first + 1)
		return job_fails(job, EINVAL, "this process has several ranks of communicator %016lx: attach it untried",
				 (unsigned long)id);
	return 0;
}

struct attempt *attempt_begin(struct nccl_job *job)
{
	size_t room = 0;
	struct attempt *attempt;
	char *rest = job->request, *line;
	uint64_t before;
	int failed = 0;

	while (comm_at(room))
		room++;
	attempt = calloc(1, sizeof(*attempt) + room * sizeof(attempt->members[0]));
	if (!attempt) {
		job_fails(job, ENOMEM, "no memory");
		return NULL;
	}
	atomic_store(&attempt->holders, 1);
	attempt->job = job->number;
	while (!failed && (line = job_line(&rest))) {
		char hex[300], how[8];
		unsigned long id;
		ncclUniqueId unique;

		if (sscanf(line, "%lx %299s %7s", &id, hex, how) != 3 || !unhex(hex, &unique) ||
		    (strcmp(how, "try") != 0 && strcmp(how, "untried") != 0))
			failed = job_fails(job, EINVAL, "not an id, a unique id and try or untried: %.60s", line);
		else
			failed = take(job, attempt, room, id, &unique, strcmp(how, "try") == 0);
	}
	if (!failed)
		return attempt;
	nccl_lock(&before);
	for (size_t i = 0; i < attempt->count; i++)
		atomic_store(&attempt->members[i].comm->state, DETACHED);
	held_look_again();
	nccl_unlock(&before);
	free(attempt);
	return NULL;
}

void attempt_let_go(struct attempt *attempt)
{
	if (atomic_fetch_sub(&attempt->holders, 1) == 1)
		free(attempt);
}
