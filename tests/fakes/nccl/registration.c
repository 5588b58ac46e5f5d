/* Objects attached to a communicator: reduction operators, registered buffers, windows; and NCCL's own memory.
 *
 * Invariant: an operator's number belongs to one communicator, is never reused and cannot be predicted. Using one with
 * another communicator is an error, as with NCCL. Device-side communicators are refused.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "communicator.h"
#include "faults.h"

#define PAGE_BYTES 4096

struct operator_handle {
	struct operator_handle *next;
	ncclRedOp_t number;
	ncclDataType_t datatype;
	struct reduction reduction;
};

struct registration {
	struct registration *next;
	void *buffer;
	size_t bytes;
	void *behind; /* a window: the registration that it made */
};

static int last_number; /* under library_lock */

static ncclRedOp_t next_number(void)
{
	if (!last_number) /* not from the first free number: a stale one must not be valid by chance */
		last_number = ncclNumOps + 1000 + (int)(random_number() & 0xffffff);
	return (ncclRedOp_t)++last_number;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence,
				      ncclComm_t handle)
{
	struct operator_handle *made;
	ncclResult_t result;
	struct ncclComm *comm = comm_enter_ready(handle, &result);

	if (!comm)
		return result;
	made = calloc(1, sizeof(*made));
	if (!op || !scalar || !made || !reducible(datatype)) {
		free(made);
		comm_leave(comm);
		return failed(ncclInvalidArgument, "an operator needs a scalar of a type that can be reduced");
	}
	made->datatype = datatype;
	made->reduction.kind = ncclNumOps;
	if (residence == ncclScalarDevice)
		made->reduction.scalar = scalar;
	else
		memcpy(made->reduction.value, scalar, element_bytes(datatype));
	pthread_mutex_lock(&library_lock);
	made->number = next_number();
	made->next = comm->operators;
	comm->operators = made;
	*op = made->number;
	pthread_mutex_unlock(&library_lock);
	comm_leave(comm);
	return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle)
{
	struct operator_handle **place, *gone = NULL;
	ncclResult_t result;
	struct ncclComm *comm = comm_enter_ready(handle, &result);

	if (!comm)
		return result;
	pthread_mutex_lock(&library_lock);
	for (place = &comm->operators; *place && !gone; place = gone ? place : &(*place)->next) {
		if ((*place)->number == op) {
			gone = *place;
			*place = gone->next;
			break;
		}
	}
	pthread_mutex_unlock(&library_lock);
	comm_leave(comm);
	if (!gone)
		return failed(ncclInvalidArgument, "%d is no operator of this communicator", (int)op);
	free(gone);
	return ncclSuccess;
}

ncclResult_t operator_resolve(struct ncclComm *comm, ncclRedOp_t op, ncclDataType_t datatype, struct reduction *reduction)
{
	const struct operator_handle *one;
	ncclResult_t result = ncclInvalidArgument;

	*reduction = (struct reduction){.kind = op};
	if (op >= ncclSum && op < ncclNumOps)
		return ncclSuccess;
	pthread_mutex_lock(&library_lock);
	for (one = comm->operators; one; one = one->next) {
		if (one->number == op && one->datatype == datatype) {
			*reduction = one->reduction;
			result = ncclSuccess;
		}
	}
	pthread_mutex_unlock(&library_lock);
	return result == ncclSuccess ?
		       result :
		       failed(result, "%d is no operator of this communicator for data type %d", (int)op, datatype);
}

void registrations_free(struct ncclComm *comm)
{
	struct operator_handle *operator;
	struct registration *registration;

	while ((operator = comm->operators)) {
		comm->operators = operator->next;
		free(operator);
	}
	while ((registration = comm->registrations)) {
		comm->registrations = registration->next;
		free(registration);
	}
}

#if FAKE_NCCL_VERSION >= 21900
static ncclResult_t attach(ncclComm_t handle, void *buffer, size_t bytes, void *behind, void **made, const char *point)
{
	struct registration *registration;
	ncclResult_t result;
	struct ncclComm *comm = comm_enter_ready(handle, &result);

	if (!comm)
		return result;
	result = fault_at(point, comm->rank, comm);
	if (result == ncclSuccess && (!buffer || !bytes || !made))
		result = failed(ncclInvalidArgument, "a buffer to register and a place for its handle are needed");
	registration = result == ncclSuccess ? calloc(1, sizeof(*registration)) : NULL;
	if (registration) {
		registration->buffer = buffer;
		registration->bytes = bytes;
		registration->behind = behind;
		pthread_mutex_lock(&library_lock);
		registration->next = comm->registrations;
		comm->registrations = registration;
		pthread_mutex_unlock(&library_lock);
		*made = registration;
	} else if (result == ncclSuccess) {
		result = failed(ncclSystemError, "out of memory");
	}
	comm_leave(comm);
	return result;
}

static ncclResult_t detach(ncclComm_t handle, void *registered, void **behind)
{
	struct registration **place, *gone = NULL;
	ncclResult_t result;
	struct ncclComm *comm = comm_enter_ready(handle, &result);

	if (!comm)
		return result;
	pthread_mutex_lock(&library_lock);
	for (place = &comm->registrations; *place; place = &(*place)->next) {
		if (*place == registered) {
			gone = *place;
			*place = gone->next;
			break;
		}
	}
	pthread_mutex_unlock(&library_lock);
	comm_leave(comm);
	if (!gone)
		return failed(ncclInvalidUsage, "%p is not registered with this communicator", registered);
	*behind = gone->behind;
	free(gone);
	return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle)
{
	return attach(comm, buffer, bytes, NULL, handle, "register");
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
	void *behind;

	return detach(comm, handle, &behind);
}

ncclResult_t ncclMemAlloc(void **memory, size_t bytes)
{
	if (!memory || !bytes)
		return failed(ncclInvalidArgument, "a size and a place for the memory are needed");
	*memory = aligned_alloc(PAGE_BYTES, (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
	return *memory ? ncclSuccess : failed(ncclSystemError, "out of memory");
}

ncclResult_t ncclMemFree(void *memory)
{
	free(memory);
	return ncclSuccess;
}
#endif

#if FAKE_NCCL_VERSION >= 22700
/* A window registers its buffer through the exported symbols, as NCCL does. */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window, int flags)
{
	void *behind, *made;
	ncclResult_t result;

	(void)flags;
	if (!window)
		return failed(ncclInvalidArgument, "nowhere to put the window");
	if ((result = ncclCommRegister(comm, buffer, bytes, &behind)) != ncclSuccess)
		return result;
	result = attach(comm, buffer, bytes, behind, &made, "windowregister");
	if (result == ncclSuccess)
		*window = made;
	else
		ncclCommDeregister(comm, behind);
	return result;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
	void *behind;
	ncclResult_t result;

	if (!window)
		return ncclSuccess;
	result = detach(comm, window, &behind);
	return result == ncclSuccess ? ncclCommDeregister(comm, behind) : result;
}
#endif

#if FAKE_NCCL_VERSION >= 22800
ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *requirements, void *device_comm)
{
	(void)comm, (void)requirements, (void)device_comm;
	return failed(ncclInvalidUsage, "device-side communicators need a device");
}

ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const void *device_comm)
{
	(void)comm, (void)device_comm;
	return failed(ncclInvalidUsage, "device-side communicators need a device");
}
#endif
