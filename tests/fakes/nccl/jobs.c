/* Jobs create communicators. They communicate with other ranks, so they may take long, and several of one process must
 * run at once.
 *
 * Invariant: a blocking job that failed leaves no communicator, and its handle is NULL; a non-blocking one leaves the
 * communicator with the error, for the caller to poll and abort, as NCCL does.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "communicator.h"

struct job *job_create(ncclResult_t (*run)(struct job *), struct ncclComm *comm, struct ncclComm *parent, ncclComm_t *handle)
{
	struct job *job = calloc(1, sizeof(*job));

	if (!job)
		return NULL;
	job->run = run;
	job->comm = comm;
	job->parent = parent;
	job->handle = handle;
	return job;
}

struct cancel job_cancel(const struct job *job)
{
	struct cancel cancel = {.count = 0};

	if (job->comm)
		cancel.fds[cancel.count++] = job->comm->abort_fd;
	if (job->parent)
		cancel.fds[cancel.count++] = job->parent->abort_fd;
	return cancel;
}

static void discard(struct ncclComm *comm)
{
	bool theirs;

	comm_stop(comm, true);
	pthread_mutex_lock(&library_lock);
	comm_unlist(comm);
	comm->users--;
	pthread_cond_broadcast(&library_changed);
	theirs = comm->aborted; /* by another thread, which waits for this one to leave and then frees it */
	while (!theirs && comm->users)
		pthread_cond_wait(&library_changed, &library_lock);
	pthread_mutex_unlock(&library_lock);
	if (!theirs)
		comm_free(comm);
}

static void job_free(struct job *job)
{
	free(job->ids);
	free(job->excluded);
	free(job);
}

static void set_building(struct job *job, bool building)
{
	pthread_mutex_lock(&library_lock);
	if (job->comm)
		job->comm->building = building;
	pthread_mutex_unlock(&library_lock);
}

/* Does the job's work and stores the result in the communicators, for callers that poll. */
static void job_work(struct job *job)
{
	job->result = job->run(job);
	if (job->result == ncclSuccess && job->comm)
		job->result = worker_start(job->comm);
	pthread_mutex_lock(&library_lock);
	if (job->comm) {
		if (job->result == ncclSuccess)
			job->comm->ready = true;
		else
			comm_fail(job->comm, job->result);
	}
	if (job->parent)
		job->parent->jobs--;
	pthread_cond_broadcast(&library_changed);
	pthread_mutex_unlock(&library_lock);
}

/* A blocking job's end, in the thread that waited for it. */
static ncclResult_t job_end(struct job *job)
{
	ncclResult_t result = job->result;

	if (job->parent)
		comm_leave(job->parent);
	if (job->comm && result == ncclSuccess) {
		comm_leave(job->comm);
	} else if (job->comm) {
		*job->handle = NULL;
		discard(job->comm);
	}
	job_free(job);
	return result;
}

/* For a job that never ran. */
static ncclResult_t job_drop(struct job *job, ncclResult_t result)
{
	if (job->parent) {
		pthread_mutex_lock(&library_lock);
		job->parent->jobs--;
		pthread_mutex_unlock(&library_lock);
	}
	job->result = result;
	return job_end(job);
}

static void *work_detached(void *argument)
{
	struct job *job = argument;

	job_work(job);
	if (job->parent)
		comm_leave(job->parent);
	if (job->comm)
		comm_leave(job->comm);
	job_free(job);
	return NULL;
}

static void *work_grouped(void *argument)
{
	struct job *job = argument, *other;

	job_work(job);
	if (job->result != ncclSuccess) /* the others might wait forever for the one that failed */
		for (other = job->siblings; other; other = other->next)
			if (other->comm)
				comm_stop(other->comm, true);
	return NULL;
}

static ncclResult_t start_detached(struct job *job)
{
	/* The communicator that is polled outlives the job, so it owns the thread: the thread is joined when it is freed. */
	struct ncclComm *owner = job->parent ? job->parent : job->comm;
	pthread_t finished;
	bool join;

	pthread_mutex_lock(&library_lock);
	join = owner->job_started; /* an earlier split, which ncclCommGetAsyncError has reported as finished */
	finished = owner->job;
	owner->job_started = false;
	pthread_mutex_unlock(&library_lock);
	if (join)
		pthread_join(finished, NULL);
	pthread_mutex_lock(&library_lock);
	owner->job_started = start_thread(&owner->job, work_detached, job, "nccl-job");
	join = owner->job_started;
	pthread_mutex_unlock(&library_lock);
	if (join)
		return ncclInProgress;
	return job_drop(job, failed(ncclSystemError, "cannot start a thread"));
}

/* Whether a job ended only because another one failed: it was cancelled, or lost its connection. */
static bool is_consequence(ncclResult_t result)
{
	return result == ncclInternalError || result == ncclRemoteError;
}

static ncclResult_t run_together(struct job *jobs)
{
	ncclResult_t result = ncclSuccess, one;
	struct job *job, *next;

	for (job = jobs; job; job = job->next)
		set_building(job, true);
	for (job = jobs; job; job = job->next) {
		job->siblings = jobs;
		if (!start_thread(&job->thread, work_grouped, job, "nccl-job"))
			abort(); /* the others wait for it and cannot be cancelled */
	}
	for (job = jobs; job; job = job->next)
		pthread_join(job->thread, NULL);
	for (job = jobs; job; job = job->next)
		set_building(job, false);
	for (job = jobs; job; job = job->next)
		if (result == ncclSuccess || (is_consequence(result) && !is_consequence(job->result)))
			result = job->result != ncclSuccess ? job->result : result;
	for (job = jobs; job; job = next) {
		next = job->next;
		if (result != ncclSuccess)
			job->result = result; /* all or none */
		one = job_end(job);
		result = result == ncclSuccess ? one : result;
	}
	return result;
}

ncclResult_t jobs_run(struct job *jobs, bool blocking)
{
	ncclResult_t result = ncclSuccess, one;
	struct job *next;

	if (!jobs)
		return ncclSuccess;
	if (blocking && jobs->next)
		return run_together(jobs);
	if (blocking) {
		set_building(jobs, true);
		job_work(jobs);
		set_building(jobs, false);
		return job_end(jobs);
	}
	for (; jobs; jobs = next) {
		next = jobs->next;
		one = start_detached(jobs);
		result = result == ncclSuccess || result == ncclInProgress ? one : result;
	}
	return result;
}

void jobs_drop(struct job *jobs)
{
	struct job *next;

	for (; jobs; jobs = next) {
		next = jobs->next;
		job_drop(jobs, ncclInternalError);
	}
}
