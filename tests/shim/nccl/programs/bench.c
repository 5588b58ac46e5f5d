/* Measures nanoseconds per ncclAllReduce with and without the shim in one run: the same empty function called directly and
 * through the shim. Linked with the shim before a NCCL whose operations do nothing (empty.c).
 *
 *   bench CALLS   →   "direct NS shim NS group NS" on stdout
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nccl_abi.h"

typedef ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);

static double now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static double per_call(all_reduce call, ncclComm_t comm, long calls)
{
	double start = now_ns();

	for (long i = 0; i < calls; i++)
		if (call(NULL, NULL, 1, ncclFloat32, ncclSum, comm, NULL) != ncclSuccess)
			exit(1);
	return (now_ns() - start) / (double)calls;
}

/* A group of four operations, per operation. */
static double per_grouped_call(ncclComm_t comm, long calls)
{
	double start = now_ns();

	for (long i = 0; i < calls; i += 4) {
		ncclGroupStart();
		for (int k = 0; k < 4; k++)
			ncclAllReduce(NULL, NULL, 1, ncclFloat32, ncclSum, comm, NULL);
		if (ncclGroupEnd() != ncclSuccess)
			exit(1);
	}
	return (now_ns() - start) / (double)calls;
}

int main(int count, char **arguments)
{
	long calls = count > 1 ? atol(arguments[1]) : 10000000;
	void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
	all_reduce direct = library ? (all_reduce)dlsym(library, "ncclAllReduce") : NULL;
	ncclUniqueId id = {{0}};
	ncclComm_t comm;
	double best[3] = {1e9, 1e9, 1e9};

	if (!direct || ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess)
		return 1;
	for (int round = 0; round < 5; round++) { /* the best of five, measured alternately: the machine may be busy */
		double ns[3] = {per_call(direct, comm, calls), per_call(ncclAllReduce, comm, calls),
				per_grouped_call(comm, calls)};

		for (int i = 0; i < 3; i++)
			best[i] = ns[i] < best[i] ? ns[i] : best[i];
	}
	printf("direct %.1f shim %.1f group %.1f\n", best[0], best[1], best[2]);
	return 0;
}
