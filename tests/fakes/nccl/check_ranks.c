/* Ranks in C, for the sanitizers: every kind of call from several processes and several threads at once.
 *
 *	check_ranks NRANKS
 *
 * Exits with 0 if every number was right and no process leaked anything.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nccl_abi.h"
#include "streams.h"

#define ROUNDS 40
#define COUNT 1000
#define STREAM(n) ((void *)(uintptr_t)(0x100 + (n)))

/* In a separate frame, because memory that main's frame still points to does not count as leaked. */
#define NOT_IN_MAIN __attribute__((noinline))

#define EXPECT(condition)                                                                          \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: rank %d: %s: %s\n", __FILE__, __LINE__, me,        \
				#condition, ncclGetLastError(NULL));                               \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)
#define OK(call) EXPECT((call) == ncclSuccess)

static int me, nranks, ids[2], aborted[2]; /* two pipes */

static ncclComm_t make_world(ncclConfig_t *config)
{
	ncclUniqueId id;
	ncclComm_t comm;
	ncclResult_t result, state;
	int i;

	if (me == 0) {
		OK(ncclGetUniqueId(&id));
		for (i = 1; i < nranks; i++)
			EXPECT(write(ids[1], &id, sizeof(id)) == sizeof(id));
	} else {
		EXPECT(read(ids[0], &id, sizeof(id)) == sizeof(id));
	}
	result = config ? ncclCommInitRankConfig(&comm, nranks, id, me, config) : ncclCommInitRank(&comm, nranks, id, me);
	if (config && !config->blocking) {
		EXPECT(result == ncclInProgress);
		do {
			sched_yield();
			OK(ncclCommGetAsyncError(comm, &state));
		} while (state == ncclInProgress);
		result = state;
	}
	OK(result);
	return comm;
}

struct caller {
	ncclComm_t comm;
	int number;
};

/* One thread with its own communicator and stream. */
static void *call_much(void *argument)
{
	const struct caller *caller = argument;
	void *stream = STREAM(caller->number);
	float *sums = calloc(COUNT, sizeof(*sums));
	int64_t *out = calloc(COUNT, sizeof(*out)), *in = calloc(COUNT, sizeof(*in));
	ncclResult_t state;
	int round, i, next = (me + 1) % nranks, before = (me + nranks - 1) % nranks;

	for (round = 0; round < ROUNDS; round++) {
		for (i = 0; i < COUNT; i++) {
			sums[i] = (float)(me + round);
			out[i] = me * 1000 + round + i;
		}
		OK(ncclGroupStart());
		OK(ncclSend(out, COUNT, ncclInt64, next, caller->comm, stream));
		OK(ncclRecv(in, COUNT, ncclInt64, before, caller->comm, stream));
		OK(ncclAllReduce(sums, sums, COUNT, ncclFloat32, ncclSum, caller->comm, stream));
		OK(ncclGroupEnd());
		OK(ncclCommGetAsyncError(caller->comm, &state));
		EXPECT(state == ncclSuccess);
		fakeNcclStreamSynchronize(stream);
		for (i = 0; i < COUNT; i++) {
			EXPECT(sums[i] == (float)(nranks * (nranks - 1) / 2 + nranks * round));
			EXPECT(in[i] == before * 1000 + round + i);
		}
	}
	free(sums);
	free(out);
	free(in);
	return NULL;
}

static NOT_IN_MAIN void check_threads(void)
{
	struct caller callers[3];
	pthread_t threads[3];
	int i;

	for (i = 0; i < 3; i++)
		callers[i] = (struct caller){.comm = make_world(NULL), .number = i};
	for (i = 0; i < 3; i++)
		EXPECT(pthread_create(&threads[i], NULL, call_much, &callers[i]) == 0);
	for (i = 0; i < 3; i++)
		EXPECT(pthread_join(threads[i], NULL) == 0);
	for (i = 0; i < 3; i++)
		OK(ncclCommDestroy(callers[i].comm));
}

static void check_every_operation(ncclComm_t comm)
{
	int32_t *out = calloc((size_t)(COUNT * nranks), sizeof(*out)), *in = calloc((size_t)(COUNT * nranks), sizeof(*in));
	int32_t factor = me + 1;
	ncclRedOp_t scaled;
	int i;

	for (i = 0; i < COUNT * nranks; i++)
		out[i] = me + 1;
	OK(ncclRedOpCreatePreMulSum(&scaled, &factor, ncclInt32, ncclScalarHostImmediate, comm));
	OK(ncclAllReduce(out, in, COUNT, ncclInt32, scaled, comm, NULL));
	OK(ncclRedOpDestroy(scaled, comm));
	fakeNcclStreamSynchronize(NULL);
	EXPECT(in[COUNT - 1] == nranks * (nranks + 1) * (2 * nranks + 1) / 6);
	OK(ncclReduceScatter(out, in, COUNT, ncclInt32, ncclProd, comm, NULL));
	OK(ncclReduce(out, in, COUNT, ncclInt32, ncclMax, 0, comm, NULL));
	OK(ncclBroadcast(out, in, COUNT, ncclInt32, 0, comm, NULL));
	OK(ncclBcast(in, COUNT, ncclInt32, 0, comm, NULL));
	OK(ncclAllGather(out, in, COUNT, ncclInt32, comm, NULL));
	OK(ncclGather(out, in, COUNT, ncclInt32, 0, comm, NULL));
	OK(ncclScatter(out, in, COUNT, ncclInt32, 0, comm, NULL));
	OK(ncclAlltoAll(out, in, COUNT, ncclInt32, comm, NULL));
	fakeNcclStreamSynchronize(NULL);
	for (i = 0; i < nranks; i++)
		EXPECT(in[i * COUNT] == i + 1);
	free(out);
	free(in);
}

static NOT_IN_MAIN void check_derived(void)
{
	ncclComm_t world = make_world(NULL), half, smaller;
	int last = nranks - 1, rank;
	void *registered;
	ncclWindow_t window;
	char buffer[64];

	OK(ncclCommSplit(world, me % 2, -me, &half, NULL));
	OK(ncclCommUserRank(half, &rank));
	if (me != last) {
		OK(ncclCommShrink(world, &last, 1, &smaller, NULL, NCCL_SHRINK_DEFAULT));
		OK(ncclCommDestroy(smaller));
	}
	OK(ncclCommRegister(world, buffer, sizeof(buffer), &registered)); /* destroying frees it */
	OK(ncclCommWindowRegister(world, buffer, sizeof(buffer), &window, 0));
	OK(ncclCommFinalize(half));
	OK(ncclCommDestroy(half));
	check_every_operation(world);
	OK(ncclCommDestroy(world));
}

static void *destroy(void *comm)
{
	EXPECT(ncclCommDestroy(comm) == ncclInternalError);
	return NULL;
}

/* Only rank 1 launches an operation: it waits in destroy, and another thread aborts it. */
static NOT_IN_MAIN void check_abort(void)
{
	ncclConfig_t config = {.size = sizeof(config), .magic = NCCL_CONFIG_MAGIC, .version = FAKE_NCCL_VERSION};
	ncclComm_t world, patient = make_world(&config);
	ncclResult_t state;
	pthread_t waiting;
	float number = 1;
	char byte = 0;
	int i;

	OK(ncclCommAbort(patient));
	world = make_world(NULL);
	if (me == 1) {
		OK(ncclAllReduce(&number, &number, 1, ncclFloat32, ncclSum, world, STREAM(9)));
		EXPECT(pthread_create(&waiting, NULL, destroy, world) == 0);
		while (ncclCommGetAsyncError(world, &state) == ncclSuccess)
			sched_yield(); /* until the thread is inside */
		OK(ncclCommAbort(world));
		EXPECT(pthread_join(waiting, NULL) == 0);
		fakeNcclStreamSynchronize(STREAM(9));
		for (i = 1; i < nranks; i++)
			EXPECT(write(aborted[1], &byte, 1) == 1);
	} else {
		EXPECT(read(aborted[0], &byte, 1) == 1);
		OK(ncclCommAbort(world));
	}
}

static NOT_IN_MAIN void check_one_process(void)
{
	ncclComm_t comms[4], children[4];
	float sums[4] = {1, 2, 3, 4};
	int i;

	OK(ncclCommInitAll(comms, 4, NULL));
	OK(ncclGroupStart());
	for (i = 0; i < 4; i++)
		OK(ncclCommSplit(comms[i], i % 2, 0, &children[i], NULL));
	OK(ncclGroupEnd());
	OK(ncclGroupStart());
	for (i = 0; i < 4; i++)
		OK(ncclAllReduce(&sums[i], &sums[i], 1, ncclFloat32, ncclSum, children[i], STREAM(i)));
	OK(ncclGroupEnd());
	for (i = 0; i < 4; i++) {
		fakeNcclStreamSynchronize(STREAM(i));
		EXPECT(sums[i] == (i % 2 ? 6 : 4));
	}
	for (i = 0; i < 4; i++)
		OK(ncclCommDestroy(children[i]));
	for (i = 0; i < 4; i++)
		OK(i ? ncclCommDestroy(comms[i]) : ncclCommAbort(comms[i]));
}

int main(int argc, char **argv)
{
	int status, failures = 0;

	nranks = argc > 1 ? atoi(argv[1]) : 2;
	if (pipe(ids) != 0 || pipe(aborted) != 0)
		return 1;
	for (me = 0; me < nranks; me++) {
		pid_t child = fork();

		if (child < 0)
			return 1;
		if (child == 0) {
			check_threads();
			check_derived();
			check_abort();
			check_one_process();
			exit(0); /* the leak check is done here */
		}
	}
	for (me = 0; me < nranks; me++)
		failures += wait(&status) < 0 || status != 0;
	return failures != 0;
}
