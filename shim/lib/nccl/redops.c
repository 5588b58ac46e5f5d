/* Virtual user reductions: the scalar is stored, and the real reduction is created when it is first needed and after every
 * attach.
 *
 * torch destroys a reduction right after the operation that uses it, also inside a group, where the shim has not launched
 * the operation yet. There the destruction is kept in the group too, after the operation.
 */
#define _GNU_SOURCE
#include "redops.h"

#include <string.h>

#include "calls.h"

#define REDOPS 4096
#define FIRST_NUMBER 0x40000000
#define NOT_MADE (-1)

struct redop {
	struct nccl_comm *_Atomic comm; /* NULL: unused */
	_Atomic int real;
	int datatype, residence;
	void *scalar; /* on the device, the application's */
	char value[16]; /* of a scalar in host memory */
};

static struct redop redops[REDOPS];
static unsigned int next;

typedef ncclResult_t (*create)(int *, void *, int, int, ncclComm_t);
typedef ncclResult_t (*destroy)(int, ncclComm_t);

static struct redop *redop_of(int number, const struct nccl_comm *comm)
{
	struct redop *redop = &redops[(unsigned int)(number - FIRST_NUMBER) % REDOPS];

	if (number < FIRST_NUMBER || number - FIRST_NUMBER >= REDOPS || !comm || atomic_load(&redop->comm) != comm)
		return NULL;
	return redop;
}

static ncclResult_t make(struct redop *redop, ncclComm_t real, struct nccl_instance *instance)
{
	create function = REAL(instance, ncclRedOpCreatePreMulSum, create);
	void *scalar = redop->residence == ncclScalarHostImmediate ? redop->value : redop->scalar;
	int number = NOT_MADE;
	ncclResult_t result = function(&number, scalar, redop->datatype, redop->residence, real);

	if (result == ncclSuccess)
		atomic_store(&redop->real, number);
	return result;
}

uint64_t redop_real(uint64_t op, struct nccl_comm *comm, struct nccl_instance *instance)
{
	struct redop *redop = redop_of((int)op, comm);
	ncclComm_t real;
	int number;

	if (!redop)
		return op;
	number = atomic_load(&redop->real);
	real = atomic_load(&comm->real);
	if (number == NOT_MADE && real && make(redop, real, instance) == ncclSuccess)
		number = atomic_load(&redop->real);
	return (uint64_t)(unsigned int)number;
}

void redops_detach(const struct nccl_comm *comm, ncclComm_t real, struct nccl_instance *instance)
{
	for (int i = 0; i < REDOPS; i++) {
		int number = NOT_MADE;

		if (atomic_load(&redops[i].comm) == comm)
			number = atomic_exchange(&redops[i].real, NOT_MADE);
		if (number != NOT_MADE)
			REAL(instance, ncclRedOpDestroy, destroy)(number, real);
	}
}

void redops_forget(const struct nccl_comm *comm)
{
	for (int i = 0; i < REDOPS; i++)
		if (atomic_load(&redops[i].comm) == comm)
			atomic_store(&redops[i].comm, NULL);
}

static size_t scalar_bytes(int datatype)
{
	static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

	return datatype >= 0 && datatype < (int)sizeof(bytes) ? bytes[datatype] : 0;
}

PROFILED(ncclResult_t, ncclRedOpCreatePreMulSum, int *op, void *scalar, int datatype, int residence, ncclComm_t handle)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_comm *comm = comm_of((uintptr_t)handle);
	struct nccl_instance *instance = real_instance();
	ncclResult_t result = ncclSuccess;
	struct redop *redop = NULL;
	ncclComm_t real;
	uint64_t before;

	if (!instance || !instance->function[SYMBOL_ncclRedOpCreatePreMulSum])
		return answer_missing(thread, SYMBOL_ncclRedOpCreatePreMulSum);
	if (!comm || thread_inside(thread) || !op || !scalar)
		return REAL(instance, ncclRedOpCreatePreMulSum, create)(op, scalar, datatype, residence, handle);
	thread->message[0] = 0;
	if (atomic_load(&comm->state) == UNUSED)
		return answer_gone(thread, comm, SYMBOL_ncclRedOpCreatePreMulSum);
	nccl_lock(&before);
	for (int i = 0; i < REDOPS && !redop; i++) {
		redop = &redops[next++ % REDOPS];
		if (atomic_load(&redop->comm))
			redop = NULL;
	}
	if (redop) {
		redop->datatype = datatype;
		redop->residence = residence;
		redop->scalar = scalar;
		if (residence == ncclScalarHostImmediate)
			memcpy(redop->value, scalar, scalar_bytes(datatype));
		atomic_store(&redop->real, NOT_MADE);
		atomic_store(&redop->comm, comm);
	}
	nccl_unlock(&before);
	if (!redop)
		return thread_error(thread, ncclSystemError, "more than %d user reductions at a time", REDOPS);
	/* Created at once if possible, so that a wrong argument is reported here. */
	real = ask_begin(thread, comm, SYMBOL_ncclRedOpCreatePreMulSum);
	instance = real_instance();
	if (real)
		result = make(redop, real, instance);
	ask_end(thread);
	if (result == ncclSuccess)
		*op = FIRST_NUMBER + (int)(redop - redops);
	else
		atomic_store(&redop->comm, NULL);
	return result;
}

static ncclResult_t make_destroy(struct nccl_thread *thread, struct nccl_instance *instance, struct nccl_call *call)
{
	struct redop *redop = redop_of((int)call->word[0], call->comm);
	ncclComm_t real = atomic_load(&call->comm->real);
	ncclResult_t result = ncclSuccess;
	int number = redop ? atomic_exchange(&redop->real, NOT_MADE) : NOT_MADE;

	(void)thread;
	if (!redop)
		return ncclInvalidArgument;
	if (number != NOT_MADE && real)
		result = REAL(instance, ncclRedOpDestroy, destroy)(number, real);
	atomic_store(&redop->comm, NULL);
	return result;
}

PROFILED(ncclResult_t, ncclRedOpDestroy, int op, ncclComm_t handle)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_comm *comm = comm_of((uintptr_t)handle);
	struct nccl_instance *instance = real_instance();
	struct nccl_call call = {
		.symbol = SYMBOL_ncclRedOpDestroy, .make = make_destroy, .comm = comm, .word[0] = (unsigned int)op};
	ncclResult_t result;

	if (!instance || !instance->function[SYMBOL_ncclRedOpDestroy])
		return answer_missing(thread, SYMBOL_ncclRedOpDestroy);
	if (!comm || thread_inside(thread) || !redop_of(op, comm))
		return REAL(instance, ncclRedOpDestroy, destroy)(op, handle);
	thread->message[0] = 0;
	if (thread->depth > 0)
		return group_keep(thread, &call);
	ask_begin(thread, comm, SYMBOL_ncclRedOpDestroy);
	instance = real_instance();
	result = make_destroy(thread, instance, &call);
	ask_end(thread);
	return result;
}
