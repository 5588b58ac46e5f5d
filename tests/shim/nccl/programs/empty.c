/* A libnccl.so.2 that does nothing, so that the benchmark measures only the shim. */
#include "nccl_abi.h"

static int nothing;

ncclResult_t ncclGetVersion(int *version)
{
	*version = FAKE_NCCL_VERSION;
	return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
	(void)nranks;
	(void)id;
	(void)rank;
	*comm = (ncclComm_t)&nothing;
	return ncclSuccess;
}

static ncclResult_t answer_zero(int *number)
{
	*number = 0;
	return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
	(void)comm;
	return answer_zero(count);
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
	(void)comm;
	return answer_zero(rank);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
	(void)comm;
	return answer_zero(device);
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
			   ncclComm_t comm, cudaStream_t stream)
{
	(void)sendbuff;
	(void)recvbuff;
	(void)count;
	(void)datatype;
	(void)op;
	(void)comm;
	(void)stream;
	return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
	return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
	return ncclSuccess;
}
