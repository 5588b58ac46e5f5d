/* Executes the operations. Every collective is one or two exchanges, in which each rank sends a block to each other
 * rank and receives one from it (often empty), followed by local arithmetic.
 *
 * Invariant: in every collective each rank receives from all others, so none completes before all have launched it.
 */
#include <stdlib.h>
#include <string.h>

#include "communicator.h"
#include "faults.h"

/* The blocks to and from one peer. */
struct block {
	void *data;
	size_t bytes;
};

struct run {
	struct ncclComm *comm;
	const struct operation *operation;
	const struct cancel *cancel;
	struct signature signature;
	size_t element;
	struct block *out, *in; /* one for each rank; this rank's own are moved by the caller */
};

static ncclResult_t no_memory(void)
{
	return failed(ncclSystemError, "out of memory");
}

static ncclResult_t exchange(struct run *run)
{
	struct ncclComm *comm = run->comm;
	struct transfer *transfers = calloc(2 * (size_t)comm->nranks, sizeof(*transfers));
	ncclResult_t result;
	size_t count = 0;
	int peer;

	if (!transfers)
		return no_memory();
	for (peer = 0; peer < comm->nranks; peer++) {
		if (peer == comm->rank)
			continue;
		transfers[count++] = (struct transfer){.peer = peer,
						       .sending = true,
						       .signature = run->signature,
						       .data = run->out[peer].data,
						       .bytes = run->out[peer].bytes};
		transfers[count++] = (struct transfer){
			.peer = peer, .signature = run->signature, .data = run->in[peer].data, .bytes = run->in[peer].bytes};
	}
	result = links_run(comm->data, comm->nranks, transfers, count, false, run->cancel);
	free(transfers);
	memset(run->out, 0, sizeof(*run->out) * (size_t)comm->nranks);
	memset(run->in, 0, sizeof(*run->in) * (size_t)comm->nranks);
	return result;
}

static void copy(void *destination, const void *source, size_t bytes)
{
	if (bytes && destination != source)
		memmove(destination, source, bytes);
}

static char *at(const void *buffer, size_t bytes)
{
	return buffer ? (char *)(uintptr_t)buffer + bytes : NULL;
}

/* The part of `count` elements that `rank` reduces for all. */
static size_t share_begin(const struct run *run, size_t count, int rank)
{
	return count / (size_t)run->comm->nranks * (size_t)rank +
	       (count % (size_t)run->comm->nranks < (size_t)rank ? count % (size_t)run->comm->nranks : (size_t)rank);
}

/* Sends each rank its share of sendbuff, and reduces the blocks received for this rank's share into `into`. */
static ncclResult_t reduce_share(struct run *run, const char *source, const size_t *begins, void *into)
{
	struct ncclComm *comm = run->comm;
	size_t mine = begins[comm->rank + 1] - begins[comm->rank], bytes = mine * run->element;
	char *received = malloc((size_t)comm->nranks * bytes + 1);
	const void **blocks = calloc((size_t)comm->nranks, sizeof(*blocks));
	ncclRedOp_t kind = run->operation->reduction.kind;
	ncclResult_t result = received && blocks ? ncclSuccess : no_memory();
	int peer;

	if (result == ncclSuccess) {
		for (peer = 0; peer < comm->nranks; peer++) {
			run->out[peer] = (struct block){at(source, begins[peer] * run->element),
							(begins[peer + 1] - begins[peer]) * run->element};
			run->in[peer] = (struct block){received + (size_t)peer * bytes, bytes};
			blocks[peer] = peer == comm->rank ? run->out[peer].data : run->in[peer].data;
		}
		result = exchange(run);
	}
	if (result == ncclSuccess)
		reduce_blocks(into, blocks, comm->nranks, mine, run->operation->datatype,
			      kind == ncclNumOps ? ncclSum : kind);
	free(blocks);
	free(received);
	return result;
}

/* AllReduce, Reduce and ReduceScatter: each rank reduces one share, and then sends it where it is needed. */
static ncclResult_t run_reduction(struct run *run)
{
	const struct operation *operation = run->operation;
	struct ncclComm *comm = run->comm;
	size_t ranks = (size_t)comm->nranks, total = operation->count, mine;
	bool scatter = operation->opcode == OP_REDUCESCATTER, is_root = operation->root == comm->rank;
	const char *source = operation->sendbuff;
	char *scaled = NULL, *reduced = NULL;
	size_t *begins = calloc(ranks + 1, sizeof(*begins));
	ncclResult_t result = ncclSuccess;
	int peer;

	if (scatter)
		total *= ranks;
	if (begins)
		for (peer = 0; peer <= comm->nranks; peer++)
			begins[peer] = share_begin(run, total, peer);
	if (operation->reduction.kind == ncclNumOps) {
		scaled = malloc(total * run->element);
		if (scaled)
			scale(scaled, source, total, operation->datatype, &operation->reduction);
		source = scaled;
	}
	mine = begins ? begins[comm->rank + 1] - begins[comm->rank] : 0;
	reduced = malloc(mine * run->element + 1);
	result = begins && source && reduced ? reduce_share(run, source, begins, reduced) : no_memory();
	if (result == ncclSuccess && scatter) {
		copy(operation->recvbuff, reduced, mine * run->element);
	} else if (result == ncclSuccess) {
		for (peer = 0; peer < comm->nranks; peer++) {
			if (operation->opcode == OP_ALLREDUCE || peer == operation->root)
				run->out[peer] = (struct block){reduced, mine * run->element};
			if (operation->opcode == OP_ALLREDUCE || is_root)
				run->in[peer] = (struct block){at(operation->recvbuff, begins[peer] * run->element),
							       (begins[peer + 1] - begins[peer]) * run->element};
		}
		if (operation->opcode == OP_ALLREDUCE || is_root)
			copy(at(operation->recvbuff, begins[comm->rank] * run->element), reduced, mine * run->element);
		if (operation->opcode == OP_ALLREDUCE)
			result = fault_at("allreduce.send", comm->rank, comm);
		if (result == ncclSuccess)
			result = exchange(run);
	}
	free(reduced);
	free(scaled);
	free(begins);
	return result;
}

/* Broadcast, AllGather, AlltoAll, Gather and Scatter only move blocks of `bytes`. */
static ncclResult_t run_moves(struct run *run)
{
	const struct operation *operation = run->operation;
	struct ncclComm *comm = run->comm;
	size_t bytes = operation->count * run->element;
	enum opcode opcode = operation->opcode;
	bool is_root = operation->root == comm->rank;
	int peer;

	for (peer = 0; peer < comm->nranks; peer++) {
		struct block *out = &run->out[peer], *in = &run->in[peer];
		bool from_root = peer == operation->root;

		if (opcode == OP_ALLGATHER || (opcode == OP_GATHER && from_root) || (opcode == OP_BROADCAST && is_root))
			*out = (struct block){at(operation->sendbuff, 0), bytes};
		if (opcode == OP_ALLTOALL || (opcode == OP_SCATTER && is_root))
			*out = (struct block){at(operation->sendbuff, (size_t)peer * bytes), bytes};
		if (opcode == OP_ALLGATHER || opcode == OP_ALLTOALL || (opcode == OP_GATHER && is_root))
			*in = (struct block){at(operation->recvbuff, (size_t)peer * bytes), bytes};
		if ((opcode == OP_SCATTER || opcode == OP_BROADCAST) && from_root)
			*in = (struct block){operation->recvbuff, bytes};
		if (peer == comm->rank && out->bytes && in->bytes)
			copy(in->data, out->data, bytes);
	}
	return exchange(run);
}

static ncclResult_t run_collective(struct ncclComm *comm, const struct operation *operation, const struct cancel *cancel)
{
	bool reduces =
		operation->opcode == OP_ALLREDUCE || operation->opcode == OP_REDUCE || operation->opcode == OP_REDUCESCATTER;
	struct run run = {
		.comm = comm,
		.operation = operation,
		.cancel = cancel,
		.element = element_bytes(operation->datatype),
		.out = calloc((size_t)comm->nranks, sizeof(struct block)),
		.in = calloc((size_t)comm->nranks, sizeof(struct block)),
	};
	ncclResult_t result;

	/* Blocks that are only moved may be of different types on two ranks, as long as they are equally long. */
	run.signature = (struct signature){.opcode = operation->opcode,
					   .datatype = reduces ? operation->datatype : 0,
					   .reduction = reduces ? operation->reduction.kind : 0,
					   .root = operation->root,
					   .count = reduces ? operation->count : operation->count * run.element};
	if (!run.out || !run.in)
		result = no_memory();
	else
		result = reduces ? run_reduction(&run) : run_moves(&run);
	free(run.out);
	free(run.in);
	return result;
}

static bool point_to_point(const struct operation *operation)
{
	return operation->opcode == OP_SEND || operation->opcode == OP_RECV;
}

/* A rank's sends to itself match its receives from itself in order; groups.c has checked that their numbers are equal. */
static ncclResult_t run_to_self(const struct ncclComm *comm, const struct batch *batch)
{
	const struct operation *send, *receive = batch->operations;

	for (send = batch->operations; send; send = send->next) {
		if (send->opcode != OP_SEND || send->root != comm->rank)
			continue;
		while (receive->opcode != OP_RECV || receive->root != comm->rank)
			receive = receive->next;
		if (send->count * element_bytes(send->datatype) != receive->count * element_bytes(receive->datatype))
			return failed(ncclInvalidUsage, "rank %d sends itself another number of bytes than it receives",
				      comm->rank);
		copy(receive->recvbuff, send->sendbuff, send->count * element_bytes(send->datatype));
		receive = receive->next;
	}
	return ncclSuccess;
}

static ncclResult_t run_point_to_point(struct ncclComm *comm, const struct batch *batch, const struct cancel *cancel)
{
	const struct operation *operation;
	struct transfer *transfers;
	size_t count = 0;
	ncclResult_t result = run_to_self(comm, batch);

	if (result != ncclSuccess)
		return result;
	for (operation = batch->operations; operation; operation = operation->next)
		count++;
	if (!(transfers = calloc(count, sizeof(*transfers))))
		return no_memory();
	count = 0;
	for (operation = batch->operations; operation; operation = operation->next) {
		size_t bytes = operation->count * element_bytes(operation->datatype);
		bool sending = operation->opcode == OP_SEND;

		if (!point_to_point(operation) || operation->root == comm->rank)
			continue;
		transfers[count++] = (struct transfer){
			.peer = operation->root,
			.sending = sending,
			.signature = {.opcode = OP_SEND, .count = bytes},
			.data = sending ? at(operation->sendbuff, 0) : operation->recvbuff,
			.bytes = bytes,
		};
	}
	result = links_run(comm->data, comm->nranks, transfers, count, false, cancel);
	free(transfers);
	return result;
}

ncclResult_t operations_run(struct ncclComm *comm, const struct batch *batch, const struct cancel *cancel)
{
	const struct operation *operation;
	ncclResult_t result = ncclSuccess;
	bool to_peers = false;

	for (operation = batch->operations; operation && result == ncclSuccess; operation = operation->next) {
		if (point_to_point(operation))
			to_peers = true;
		else
			result = run_collective(comm, operation, cancel);
	}
	if (result == ncclSuccess && to_peers)
		result = run_point_to_point(comm, batch, cancel);
	return result;
}
