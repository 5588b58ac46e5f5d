/* The communicators of this process: valid handles, the number of calls inside each, and its state.
 *
 * Invariant: a handle that is not listed is never dereferenced, so a stale handle or one of another library results in
 * ncclInvalidArgument. A communicator is freed only when no call is inside.
 */
#define _GNU_SOURCE
#include "communicator.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pthread_mutex_t library_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t library_changed = PTHREAD_COND_INITIALIZER;
static struct ncclComm *listed;

/* The library's threads take no signals: those belong to the program. */
bool start_thread(pthread_t *thread, void *(*body)(void *), void *argument, const char *name)
{
	sigset_t all, before;
	bool started;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	started = pthread_create(thread, NULL, body, argument) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (started)
		pthread_setname_np(*thread, name);
	return started;
}

static ncclResult_t read_config(struct ncclComm *comm, const ncclConfig_t *given)
{
	ncclConfig_t config;

	if (given->magic != NCCL_CONFIG_MAGIC || given->size < offsetof(ncclConfig_t, blocking) + sizeof(int))
		return failed(ncclInvalidArgument, "the config was not initialised with NCCL_CONFIG_INITIALIZER");
	memset(&config, 0, sizeof(config));
	config.blocking = NCCL_CONFIG_UNDEF_INT;
	memcpy(&config, given, given->size < sizeof(config) ? given->size : sizeof(config));
	if (config.blocking != NCCL_CONFIG_UNDEF_INT && config.blocking != 0 && config.blocking != 1)
		return failed(ncclInvalidArgument, "config.blocking is %d: 0 or 1 is expected", config.blocking);
	if (config.blocking != NCCL_CONFIG_UNDEF_INT)
		comm->blocking = config.blocking != 0;
	/* Reads both strings as NCCL does, so that AddressSanitizer detects a config that points to freed text. */
	if (config.netName && !*config.netName)
		return failed(ncclInvalidArgument, "config.netName is empty");
	if (config.commName)
		snprintf(comm->name, sizeof(comm->name), "%s", config.commName);
	return ncclSuccess;
}

ncclResult_t comm_create(struct ncclComm **made, const ncclConfig_t *config, const struct ncclComm *parent)
{
	struct ncclComm *comm = calloc(1, sizeof(*comm));
	ncclResult_t result = ncclSuccess;

	if (!comm)
		return failed(ncclSystemError, "out of memory");
	keep_leavings();
	comm->stop_fd = comm->abort_fd = -1;
	comm->blocking = parent ? parent->blocking : true;
	comm->device = parent ? parent->device : fakeNcclGetDevice();
	comm->users = 1;
	if (config)
		result = read_config(comm, config);
	if (result == ncclSuccess)
		result = cancel_open(&comm->stop_fd);
	if (result == ncclSuccess)
		result = cancel_open(&comm->abort_fd);
	if (result == ncclSuccess)
		result = buffer_get(comm);
	if (result != ncclSuccess) {
		comm_free(comm);
		return result;
	}
	pthread_mutex_lock(&library_lock);
	comm->next = listed;
	listed = comm;
	pthread_mutex_unlock(&library_lock);
	*made = comm;
	return ncclSuccess;
}

struct ncclComm *comm_first(void)
{
	return listed;
}

struct ncclComm *comm_listed(ncclComm_t handle)
{
	struct ncclComm *comm;

	for (comm = listed; comm && comm != handle; comm = comm->next)
		;
	return comm;
}

void comm_unlist(struct ncclComm *comm)
{
	struct ncclComm **place;

	for (place = &listed; *place; place = &(*place)->next) {
		if (*place == comm) {
			*place = comm->next;
			return;
		}
	}
}

struct ncclComm *comm_enter(ncclComm_t handle)
{
	struct ncclComm *comm;

	pthread_mutex_lock(&library_lock);
	comm = comm_listed(handle);
	if (comm && comm->destroy_called)
		comm = NULL;
	if (comm)
		comm->users++;
	pthread_mutex_unlock(&library_lock);
	if (!comm)
		failed(ncclInvalidArgument, "%p is no communicator of this library", (void *)handle);
	return comm;
}

void comm_leave(struct ncclComm *comm)
{
	pthread_mutex_lock(&library_lock);
	comm->users--;
	pthread_cond_broadcast(&library_changed);
	pthread_mutex_unlock(&library_lock);
}

/* Enters a communicator that accepts work now. It calls the exported ncclCommGetAsyncError, as NCCL does, so a
 * preloaded library is called back with the real handle. */
struct ncclComm *comm_enter_ready(ncclComm_t handle, ncclResult_t *result)
{
	struct ncclComm *comm = comm_enter(handle);
	ncclResult_t state = ncclSuccess;

	*result = ncclInvalidArgument;
	if (!comm)
		return NULL;
	*result = ncclCommGetAsyncError(comm, &state);
	if (*result == ncclSuccess && state == ncclInProgress)
		*result = failed(ncclInvalidArgument,
				 "the communicator is still busy with the call before: poll ncclCommGetAsyncError first");
	else if (*result == ncclSuccess)
		*result = state;
	if (*result == ncclSuccess)
		return comm;
	comm_leave(comm);
	return NULL;
}

void comm_stop(struct ncclComm *comm, bool jobs_too)
{
	atomic_store(&comm->stopped, true);
	cancel_signal(comm->stop_fd);
	if (jobs_too)
		cancel_signal(comm->abort_fd);
	pthread_mutex_lock(&library_lock);
	pthread_cond_broadcast(&library_changed);
	pthread_mutex_unlock(&library_lock);
	fakeNcclTicketsWake();
}

void comm_fail(struct ncclComm *comm, ncclResult_t result)
{
	if (comm->async_result == ncclSuccess && !comm->revoked) {
		comm->async_result = result;
		snprintf(comm->reason, sizeof(comm->reason), "%s%s%s", comm->name, *comm->name ? ": " : "", last_reason());
	}
	pthread_cond_broadcast(&library_changed);
}

void comm_free(struct ncclComm *comm)
{
	if (comm->worker_started)
		pthread_join(comm->worker, NULL);
	if (comm->job_started)
		pthread_join(comm->job, NULL);
	if (comm->data)
		links_close(comm->data, comm->nranks, false);
	if (comm->control)
		links_close(comm->control, comm->nranks, false);
	if (comm->stop_fd >= 0)
		close(comm->stop_fd);
	if (comm->abort_fd >= 0)
		close(comm->abort_fd);
	buffer_drop(comm);
	registrations_free(comm);
	free(comm->data);
	free(comm->control);
	free(comm->members);
	free(comm);
}

bool comm_copy_reason(ncclComm_t handle, char *reason)
{
	struct ncclComm *comm;
	bool has_one;

	pthread_mutex_lock(&library_lock);
	comm = comm_listed(handle);
	has_one = comm && *comm->reason;
	if (has_one)
		memcpy(reason, comm->reason, WHY_BYTES);
	pthread_mutex_unlock(&library_lock);
	return has_one;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *state)
{
	struct ncclComm *comm;

	if (!state)
		return failed(ncclInvalidArgument, "nowhere to put the state");
	if (!(comm = comm_enter(handle)))
		return ncclInvalidArgument;
	pthread_mutex_lock(&library_lock);
	if (comm->async_result != ncclSuccess)
		*state = comm->async_result;
	else if (!comm->ready ||
		 (!comm->blocking && (comm->jobs || comm->launch_unseen || (comm->finalize_called && !comm->finalized))))
		*state = ncclInProgress;
	else
		*state = ncclSuccess;
	comm->launch_unseen = false;
	pthread_mutex_unlock(&library_lock);
	comm_leave(comm);
	return ncclSuccess;
}

static ncclResult_t ask(ncclComm_t handle, int *answer, size_t offset)
{
	ncclResult_t result;
	struct ncclComm *comm;

	if (!answer)
		return failed(ncclInvalidArgument, "nowhere to put the answer");
	if (!(comm = comm_enter_ready(handle, &result)))
		return result;
	memcpy(answer, (char *)comm + offset, sizeof(*answer));
	comm_leave(comm);
	return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
	return ask(comm, count, offsetof(struct ncclComm, nranks));
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
	return ask(comm, rank, offsetof(struct ncclComm, rank));
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
	return ask(comm, device, offsetof(struct ncclComm, device));
}
