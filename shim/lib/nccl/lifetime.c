/* Queries about a communicator, and its destruction, which work in every state.
 *
 * Watchdogs query communicators continuously, and must neither wait nor get a false error: while a communicator is detached
 * the shim answers success. While there is a real one, the real one answers, because a non-blocking operation that is in
 * progress must not be reported as complete.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "gate.h"
#include "redops.h"

typedef ncclResult_t (*on_comm)(ncclComm_t);
typedef ncclResult_t (*ask_number)(ncclComm_t, int *);

static ncclResult_t refuse_or_end(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call);

/* Ends the communicator, or leaves that to the worker that is detaching or attaching it. */
static ncclResult_t make_end(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	struct nccl_comm *comm = call->comm;
	bool abort = call->symbol == SYMBOL_ncclCommAbort;
	ncclResult_t result = ncclSuccess;
	ncclComm_t real;
	uint64_t before;
	int state;

	nccl_lock(&before);
	state = atomic_load(&comm->state);
	if (state == DETACHING || state == ATTACHING) {
		atomic_store(&comm->doomed, abort ? 2 : 1);
		nccl_unlock(&before);
		return ncclSuccess;
	}
	if (state == UNUSED || state == ENDING) {
		nccl_unlock(&before);
		return answer_gone(thread, comm, call->symbol);
	}
	atomic_store(&comm->state, ENDING);
	real = atomic_exchange(&comm->real, NULL);
	held_look_again(); /* a thread that waits at the gate for it gets an error */
	nccl_unlock(&before);
	if (real)
		result = ((on_comm)instance->function[call->symbol])(real);
	if (result != ncclSuccess && result != ncclInProgress) { /* NCCL still has it */
		atomic_store(&comm->real, real);
		atomic_store(&comm->state, state);
		return result;
	}
	redops_forget(comm);
	comm_end(comm, abort);
	return result;
}

static ncclResult_t make_finalize(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	ncclComm_t real = atomic_load(&call->comm->real);
	ncclResult_t result = ncclSuccess;

	if (atomic_load(&call->comm->state) == UNUSED)
		return answer_gone(thread, call->comm, call->symbol);
	atomic_store(&call->comm->finalized, true); /* while it is detached: attach finalizes the new real one */
	if (real)
		result = REAL(instance, ncclCommFinalize, on_comm)(real);
	if (result != ncclSuccess && result != ncclInProgress)
		atomic_store(&call->comm->finalized, false);
	return result;
}

static ncclResult_t end(int symbol, ncclComm_t handle)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_call call = {.symbol = symbol, .make = refuse_or_end, .comm = comm_of((uintptr_t)handle)};
	ncclResult_t result;

	if (!instance)
		return answer_missing(thread, symbol);
	if (thread_inside(thread) || !call.comm)
		return ((on_comm)instance->function[symbol])(handle);
	thread->message[0] = 0;
	if (thread->depth > 0)
		return group_keep(thread, &call);
	ask_begin(thread, call.comm, symbol);
	instance = real_instance();
	result = refuse_or_end(thread, instance, &call);
	ask_end(thread);
	return result;
}

static ncclResult_t refuse_or_end(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	if (call->symbol == SYMBOL_ncclCommFinalize)
		return make_finalize(thread, instance, call);
	return make_end(thread, instance, call);
}

PROFILED(ncclResult_t, ncclCommFinalize, ncclComm_t comm)
{
	return end(SYMBOL_ncclCommFinalize, comm);
}

PROFILED(ncclResult_t, ncclCommDestroy, ncclComm_t comm)
{
	return end(SYMBOL_ncclCommDestroy, comm);
}

PROFILED(ncclResult_t, ncclCommAbort, ncclComm_t comm)
{
	return end(SYMBOL_ncclCommAbort, comm);
}

PROFILED(ncclResult_t, ncclCommGetAsyncError, ncclComm_t handle, ncclResult_t *answer)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_comm *comm = comm_of((uintptr_t)handle);
	ncclResult_t result = ncclSuccess;
	ncclComm_t real;
	int state;

	if (!instance)
		return answer_missing(thread, SYMBOL_ncclCommGetAsyncError);
	if (thread_inside(thread) || !comm || !answer)
		return REAL(instance, ncclCommGetAsyncError, ncclResult_t (*)(ncclComm_t, ncclResult_t *))(handle, answer);
	real = ask_begin(thread, comm, SYMBOL_ncclCommGetAsyncError);
	instance = real_instance();
	state = atomic_load(&comm->state);
	if (state == UNUSED || state == ENDING)
		result = answer_gone(thread, comm, SYMBOL_ncclCommGetAsyncError);
	else if (real)
		result = REAL(instance, ncclCommGetAsyncError, ncclResult_t (*)(ncclComm_t, ncclResult_t *))(real, answer);
	else if (state == PENDING || state == LIVE)
		*answer = ncclInProgress; /* NCCL has not returned the handle yet */
	else
		*answer = state == LOST ? ncclSystemError : ncclSuccess;
	if (real && result == ncclSuccess && *answer == ncclSuccess && atomic_load(&comm->initialising)) {
		atomic_store(&comm->initialising, false);
		comm_learn(comm, real, instance);
	}
	ask_end(thread);
	return result;
}

/* Answers from the record; queries the real one only for what is not known yet. */
static ncclResult_t number(int symbol, ncclComm_t handle, _Atomic int *(*field)(struct nccl_comm *), int *answer)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_comm *comm = comm_of((uintptr_t)handle);
	ncclResult_t result;
	ncclComm_t real;

	if (!instance)
		return answer_missing(thread, symbol);
	if (thread_inside(thread) || !comm || !answer)
		return ((ask_number)instance->function[symbol])(handle, answer);
	if (atomic_load(&comm->state) == UNUSED)
		return answer_gone(thread, comm, symbol);
	real = ask_begin(thread, comm, symbol);
	instance = real_instance();
	if (real && (atomic_load(&comm->initialising) || atomic_load(field(comm)) < 0)) {
		result = ((ask_number)instance->function[symbol])(real, answer);
		if (result == ncclSuccess)
			atomic_store(field(comm), *answer);
	} else if (atomic_load(field(comm)) >= 0) {
		*answer = atomic_load(field(comm));
		result = ncclSuccess;
	} else {
		result = answer_gone(thread, comm, symbol);
	}
	ask_end(thread);
	return result;
}

static _Atomic int *field_nranks(struct nccl_comm *comm)
{
	return &comm->nranks;
}

static _Atomic int *field_rank(struct nccl_comm *comm)
{
	return &comm->rank;
}

static _Atomic int *field_device(struct nccl_comm *comm)
{
	return &comm->device;
}

PROFILED(ncclResult_t, ncclCommCount, ncclComm_t comm, int *answer)
{
	return number(SYMBOL_ncclCommCount, comm, field_nranks, answer);
}

PROFILED(ncclResult_t, ncclCommUserRank, ncclComm_t comm, int *answer)
{
	return number(SYMBOL_ncclCommUserRank, comm, field_rank, answer);
}

PROFILED(ncclResult_t, ncclCommCuDevice, ncclComm_t comm, int *answer)
{
	return number(SYMBOL_ncclCommCuDevice, comm, field_device, answer);
}

PROFILED(const char *, ncclGetLastError, ncclComm_t handle)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_comm *comm = comm_of((uintptr_t)handle);
	typedef const char *(*last_error)(ncclComm_t);
	const char *answer;
	ncclComm_t real;

	if (thread->message[0])
		return thread->message;
	if (!instance || !instance->function[SYMBOL_ncclGetLastError])
		return "";
	if (thread_inside(thread) || !comm)
		return REAL(instance, ncclGetLastError, last_error)(handle);
	real = ask_begin(thread, comm, SYMBOL_ncclGetLastError);
	answer = REAL(real_instance(), ncclGetLastError, last_error)(real);
	ask_end(thread);
	return answer;
}

PROFILED(ncclResult_t, ncclGetVersion, int *version)
{
	struct nccl_instance *instance = real_instance();

	if (!instance)
		return answer_missing(thread_self(), SYMBOL_ncclGetVersion);
	return REAL(instance, ncclGetVersion, ncclResult_t (*)(int *))(version);
}
