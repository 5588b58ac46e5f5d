/* Preloaded by a test: records the calls that the fake makes to its own exports, with the handle, in the file that
 * NOTE_CALLS names, and forwards them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "nccl_abi.h"

static void note(const char *name, const void *comm)
{
	const char *path = getenv("NOTE_CALLS");
	FILE *file = path ? fopen(path, "ae") : NULL;

	if (!file)
		abort();
	fprintf(file, "%s %p\n", name, comm);
	fclose(file);
}

/* The real one is loaded by the program, not linked, so RTLD_NEXT does not find it. */
static void *real(const char *name)
{
	void *library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW);
	void *found = library ? dlsym(library, name) : NULL;

	if (!found)
		abort();
	dlclose(library);
	return found;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	note("ncclGetUniqueId", NULL);
	return ((ncclResult_t (*)(ncclUniqueId *))real("ncclGetUniqueId"))(id);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
	note("ncclCommInitRank", NULL);
	return ((ncclResult_t (*)(ncclComm_t *, int, ncclUniqueId, int))real("ncclCommInitRank"))(comm, nranks, id, rank);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
	note("ncclCommGetAsyncError", comm);
	return ((ncclResult_t (*)(ncclComm_t, ncclResult_t *))real("ncclCommGetAsyncError"))(comm, state);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
			   ncclComm_t comm, cudaStream_t stream)
{
	note("ncclBroadcast", comm);
	return ((ncclResult_t (*)(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t))real(
		"ncclBroadcast"))(sendbuff, recvbuff, count, datatype, root, comm, stream);
}
