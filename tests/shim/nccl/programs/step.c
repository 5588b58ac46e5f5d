/* Measures nanoseconds per step of two processes that only make a small all-reduce and wait for it, on the stand-in.
 *
 *   step STEPS   →   "step NS" on stdout
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "nccl_abi.h"

int fakeNcclStreamSynchronize(void *stream);

static double now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int run(int rank, ncclUniqueId id, long steps)
{
	float value[256] = {1};
	ncclComm_t comm;
	double start = 0;

	if (ncclCommInitRank(&comm, 2, id, rank) != ncclSuccess)
		return 1;
	for (long i = -steps / 10; i < steps; i++) { /* the first tenth warms up */
		if (i == 0)
			start = now_ns();
		if (ncclAllReduce(value, value, 256, ncclFloat32, ncclMax, comm, NULL) != ncclSuccess)
			return 1;
		if (fakeNcclStreamSynchronize(NULL))
			return 1;
	}
	if (rank == 0)
		printf("step %.0f\n", (now_ns() - start) / (double)steps);
	return ncclCommDestroy(comm) != ncclSuccess;
}

int main(int count, char **arguments)
{
	long steps = count > 1 ? atol(arguments[1]) : 10000;
	ncclUniqueId id;
	int status, failed, ends[2];
	pid_t other;

	if (pipe(ends))
		return 1;
	other = fork();
	if (other < 0)
		return 1;
	if (other == 0)
		return read(ends[0], &id, sizeof(id)) != sizeof(id) || run(1, id, steps);
	if (ncclGetUniqueId(&id) != ncclSuccess || write(ends[1], &id, sizeof(id)) != sizeof(id))
		return 1;
	failed = run(0, id, steps);
	return waitpid(other, &status, 0) != other || status || failed;
}
