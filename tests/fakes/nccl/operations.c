/* The calls that launch operations: they check their arguments and add the operation to the group. None of them waits.
 *
 * ncclBcast calls ncclBroadcast through the exported symbol, as NCCL does, so a preloaded library is entered again with
 * the real handle.
 */
#include <stdlib.h>

#include "communicator.h"
#include "faults.h"

const char *opcode_name(enum opcode opcode)
{
	static const char *const names[OPCODES] = {
		[OP_ALLREDUCE] = "allreduce",
		[OP_BROADCAST] = "broadcast",
		[OP_REDUCE] = "reduce",
		[OP_ALLGATHER] = "allgather",
		[OP_REDUCESCATTER] = "reducescatter",
		[OP_ALLTOALL] = "alltoall",
		[OP_GATHER] = "gather",
		[OP_SCATTER] = "scatter",
		[OP_SEND] = "send",
		[OP_RECV] = "recv",
		[OP_FINALIZE] = "finalize",
		[OP_SPLIT] = "split",
		[OP_SHRINK] = "shrink",
	};

	return opcode < OPCODES ? names[opcode] : "an unknown operation";
}

static ncclResult_t check(const struct ncclComm *comm, const struct operation *operation)
{
	bool is_root = operation->root == comm->rank;
	enum opcode opcode = operation->opcode;
	bool sends = opcode != OP_RECV && (is_root || (opcode != OP_BROADCAST && opcode != OP_SCATTER));
	bool receives = opcode != OP_SEND && (is_root || (opcode != OP_REDUCE && opcode != OP_GATHER));
	bool reduces = opcode == OP_ALLREDUCE || opcode == OP_REDUCE || opcode == OP_REDUCESCATTER, closing;

	pthread_mutex_lock(&library_lock);
	closing = comm->finalize_called || comm->revoked;
	pthread_mutex_unlock(&library_lock);
	if (!element_bytes(operation->datatype))
		return failed(ncclInvalidArgument, "%s: there is no data type %d", opcode_name(opcode), operation->datatype);
	if (operation->root < 0 || operation->root >= comm->nranks)
		return failed(ncclInvalidArgument, "%s: there is no rank %d among %d", opcode_name(opcode), operation->root,
			      comm->nranks);
	if (operation->count && ((sends && !operation->sendbuff) || (receives && !operation->recvbuff)))
		return failed(ncclInvalidArgument, "%s: a buffer is NULL", opcode_name(opcode));
	if (reduces && !reducible(operation->datatype))
		return failed(ncclInvalidArgument, "%s: data type %d can be moved but not reduced here", opcode_name(opcode),
			      operation->datatype);
	if (closing)
		return failed(ncclInvalidUsage, "%s: the communicator was finalised or revoked", opcode_name(opcode));
	return ncclSuccess;
}

static ncclResult_t start(struct operation operation, ncclRedOp_t op, ncclComm_t handle)
{
	ncclResult_t result;
	struct ncclComm *comm = comm_enter_ready(handle, &result);
	bool empty = !operation.count && operation.opcode != OP_SEND && operation.opcode != OP_RECV;

	if (!comm)
		return group_note(result);
	operation.comm = comm;
	result = check(comm, &operation);
	if (result == ncclSuccess)
		result = operator_resolve(comm, op, operation.datatype, &operation.reduction);
	if (result == ncclSuccess)
		result = fault_at(opcode_name(operation.opcode), comm->rank, comm);
	if (result == ncclSuccess && !empty)
		return group_note(group_add_operation(&operation));
	comm_leave(comm);
	return group_note(result);
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
			   ncclComm_t comm, cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_ALLREDUCE,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = count,
					.datatype = datatype,
					.stream = stream},
		     op, comm);
}

ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root,
			ncclComm_t comm, cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_REDUCE,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = count,
					.datatype = datatype,
					.root = root,
					.stream = stream},
		     op, comm);
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
			       ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_REDUCESCATTER,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = recvcount,
					.datatype = datatype,
					.stream = stream},
		     op, comm);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
			   ncclComm_t comm, cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_BROADCAST,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = count,
					.datatype = datatype,
					.root = root,
					.stream = stream},
		     ncclSum, comm);
}

ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)
{
	return ncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm,
			   cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_ALLGATHER,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = sendcount,
					.datatype = datatype,
					.stream = stream},
		     ncclSum, comm);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
		      cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_SEND,
					.sendbuff = sendbuff,
					.count = count,
					.datatype = datatype,
					.root = peer,
					.stream = stream},
		     ncclSum, comm);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_RECV,
					.recvbuff = recvbuff,
					.count = count,
					.datatype = datatype,
					.root = peer,
					.stream = stream},
		     ncclSum, comm);
}

#if FAKE_NCCL_VERSION >= 22800
ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
			  cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_ALLTOALL,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = count,
					.datatype = datatype,
					.stream = stream},
		     ncclSum, comm);
}

ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
			ncclComm_t comm, cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_GATHER,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = count,
					.datatype = datatype,
					.root = root,
					.stream = stream},
		     ncclSum, comm);
}

ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
			 ncclComm_t comm, cudaStream_t stream)
{
	return start((struct operation){.opcode = OP_SCATTER,
					.sendbuff = sendbuff,
					.recvbuff = recvbuff,
					.count = count,
					.datatype = datatype,
					.root = root,
					.stream = stream},
		     ncclSum, comm);
}
#endif
