/* One command about NCCL while it runs: its deadline, its request, the reason of its failure, and its reference count. */
#define _GNU_SOURCE
#include "command.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/shim.h"

#define LOOK_AGAIN_US 500

static struct nccl_job *_Atomic busy; /* the command that calls NCCL now */
static struct nccl_job *_Atomic loader; /* the command that may load a copy of NCCL */

bool job_claim(struct nccl_job *job)
{
	struct nccl_job *none = NULL;

	return atomic_compare_exchange_strong(&busy, &none, job);
}

int job_claim_loading(struct nccl_job *job)
{
	struct nccl_job *none = NULL;

	while (!atomic_compare_exchange_strong(&loader, &none, job)) {
		if (!job_in_time(job))
			return job_fails(job, ETIMEDOUT, "an earlier command still loads a fresh copy of NCCL");
		none = NULL;
		pause_us(LOOK_AGAIN_US);
	}
	return 0;
}

void job_over(struct nccl_job *job)
{
	struct nccl_job *calls = job, *loads = job;

	atomic_compare_exchange_strong(&loader, &loads, NULL);
	atomic_compare_exchange_strong(&busy, &calls, NULL);
}

void jobs_forget(void)
{
	atomic_store(&busy, NULL);
	atomic_store(&loader, NULL);
}

bool job_in_time(const struct nccl_job *job)
{
	return !atomic_load(&job->given_up) && now_ns() < job->until_ns;
}

int job_fails(struct nccl_job *job, int status, const char *format, ...)
{
	va_list list;

	if (job->status)
		return job->status;
	va_start(list, format);
	vsnprintf(job->message, sizeof(job->message), format, list);
	va_end(list);
	return job->status = status;
}

char *job_line(char **rest)
{
	char *line = *rest, *end = line + strcspn(line, "\n");

	if (!*line)
		return NULL;
	*rest = *end ? end + 1 : end;
	*end = 0;
	return line;
}

void job_let_go(struct nccl_job *job)
{
	if (atomic_fetch_sub(&job->holders, 1) == 1) {
		free(job->reply);
		munmap(job, job->bytes);
	}
}
