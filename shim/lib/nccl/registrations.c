/* Virtual registrations: the application's handle is the address of our record, which contains the real handle. That one
 * changes with every attach. */
#define _GNU_SOURCE
#include "registrations.h"

#include <stdlib.h>

#include "calls.h"

typedef ncclResult_t (*take)(ncclComm_t, void *, size_t, void **);
typedef ncclResult_t (*give)(ncclComm_t, void *);

static _Atomic int allocated;

int allocations(void)
{
	return atomic_load(&allocated);
}

void registrations_detach(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance)
{
	struct nccl_registration *registration;

	for (registration = comm->registrations; registration; registration = registration->next) {
		if (registration->real)
			REAL(instance, ncclCommDeregister, give)(real, registration->real);
		registration->real = NULL;
	}
}

ncclResult_t registrations_attach(struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance)
{
	struct nccl_registration *registration;
	ncclResult_t result = ncclSuccess;

	for (registration = comm->registrations; registration && result == ncclSuccess; registration = registration->next)
		if (!registration->real)
			result = REAL(instance, ncclCommRegister, take)(real, registration->buffer, registration->bytes,
									&registration->real);
	return result;
}

PROFILED(ncclResult_t, ncclCommRegister, ncclComm_t handle, void *buffer, size_t bytes, void **out)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_comm *comm = comm_of((uintptr_t)handle);
	struct nccl_registration *registration;
	ncclResult_t result = ncclSuccess;
	ncclComm_t real;
	uint64_t before;

	if (!instance || !instance->function[SYMBOL_ncclCommRegister])
		return answer_missing(thread, SYMBOL_ncclCommRegister);
	if (thread_inside(thread) || !comm || !out)
		return REAL(instance, ncclCommRegister, take)(handle, buffer, bytes, out);
	thread->message[0] = 0;
	if (atomic_load(&comm->state) == UNUSED)
		return answer_gone(thread, comm, SYMBOL_ncclCommRegister);
	registration = calloc(1, sizeof(*registration));
	if (!registration)
		return thread_error(thread, ncclSystemError, "no memory for another registration");
	registration->buffer = buffer;
	registration->bytes = bytes;
	/* If the communicator is detached, the buffer is registered when it is attached again. */
	real = ask_begin(thread, comm, SYMBOL_ncclCommRegister);
	instance = real_instance();
	if (real)
		result = REAL(instance, ncclCommRegister, take)(real, buffer, bytes, &registration->real);
	nccl_lock(&before);
	if (!real) { /* it may have been attached meanwhile, without this registration */
		real = atomic_load(&comm->real);
		if (real)
			result = REAL(instance, ncclCommRegister, take)(real, buffer, bytes, &registration->real);
	}
	if (result == ncclSuccess) {
		registration->next = comm->registrations;
		comm->registrations = registration;
	}
	nccl_unlock(&before);
	if (result == ncclSuccess)
		*out = registration;
	else
		free(registration);
	ask_end(thread);
	return result;
}

PROFILED(ncclResult_t, ncclCommDeregister, ncclComm_t handle, void *given)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance = real_instance();
	struct nccl_comm *comm = comm_of((uintptr_t)handle);
	struct nccl_registration **at, *registration = NULL;
	ncclResult_t result = ncclSuccess;
	ncclComm_t real;
	uint64_t before;

	if (!instance || !instance->function[SYMBOL_ncclCommDeregister])
		return answer_missing(thread, SYMBOL_ncclCommDeregister);
	if (thread_inside(thread) || !comm)
		return REAL(instance, ncclCommDeregister, give)(handle, given);
	thread->message[0] = 0;
	real = ask_begin(thread, comm, SYMBOL_ncclCommDeregister);
	instance = real_instance();
	nccl_lock(&before);
	for (at = &comm->registrations; *at && *at != given; at = &(*at)->next)
		;
	registration = *at;
	if (registration)
		*at = registration->next;
	nccl_unlock(&before);
	if (!registration)
		result = thread_error(thread, ncclInvalidUsage, "ncclCommDeregister: no such registration");
	else if (real && registration->real)
		result = REAL(instance, ncclCommDeregister, give)(real, registration->real);
	ask_end(thread);
	free(registration);
	return result;
}

PROFILED(ncclResult_t, ncclMemAlloc, void **memory, size_t bytes)
{
	struct nccl_instance *instance = real_instance();
	ncclResult_t result;

	if (!instance || !instance->function[SYMBOL_ncclMemAlloc])
		return answer_missing(thread_self(), SYMBOL_ncclMemAlloc);
	result = REAL(instance, ncclMemAlloc, ncclResult_t (*)(void **, size_t))(memory, bytes);
	if (result == ncclSuccess && memory && *memory)
		atomic_fetch_add(&allocated, 1);
	return result;
}

PROFILED(ncclResult_t, ncclMemFree, void *memory)
{
	struct nccl_instance *instance = real_instance();
	ncclResult_t result;

	if (!instance || !instance->function[SYMBOL_ncclMemFree])
		return answer_missing(thread_self(), SYMBOL_ncclMemFree);
	result = REAL(instance, ncclMemFree, ncclResult_t (*)(void *))(memory);
	if (result == ncclSuccess && memory)
		atomic_fetch_sub(&allocated, 1);
	return result;
}
