/* One rank, for sanitizers: two threads on three communicators and a watchdog. It checks every result and runs until
 * MEETING/stop exists. Linked with the shim before NCCL, as a preloaded library comes first.
 *
 *   job MEETING RANK NRANKS
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl_abi.h"
#include "streams.h"

#define CHECK(condition)                                                                \
	do {                                                                            \
		if (!(condition)) {                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
			_exit(1);                                                       \
		}                                                                       \
	} while (0)
#define OK(call) CHECK((call) == ncclSuccess)

static const char *meeting;
static int rank, nranks;
static ncclComm_t world, pairs, other;
static sem_t asked, done;
static atomic_bool ends;

static ncclUniqueId shared_id(const char *name)
{
	char path[512], fresh[520];
	ncclUniqueId id;
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s", meeting, name);
	snprintf(fresh, sizeof(fresh), "%s.new", path);
	if (rank == 0) {
		OK(ncclGetUniqueId(&id));
		CHECK((file = fopen(fresh, "w")) && fwrite(&id, sizeof(id), 1, file) == 1 && fclose(file) == 0);
		CHECK(rename(fresh, path) == 0);
		return id;
	}
	while (!(file = fopen(path, "r")))
		usleep(2000);
	CHECK(fread(&id, sizeof(id), 1, file) == 1);
	fclose(file);
	return id;
}

static void tell_step(int step)
{
	char path[512], fresh[520];
	FILE *file;

	snprintf(path, sizeof(path), "%s/step-%d", meeting, rank);
	snprintf(fresh, sizeof(fresh), "%s.new", path);
	CHECK((file = fopen(fresh, "w")) && fprintf(file, "%d", step) > 0 && fclose(file) == 0);
	CHECK(rename(fresh, path) == 0);
}

static void sum(ncclComm_t comm, int step, cudaStream_t stream)
{
	int64_t value = rank + step, total = -1;

	OK(ncclAllReduce(&value, &total, 1, ncclInt64, ncclSum, comm, stream));
	fakeNcclStreamSynchronize(stream);
	CHECK(total == (int64_t)nranks * (nranks - 1) / 2 + (int64_t)nranks * step);
}

static void ring(int step)
{
	int32_t there = rank * 3 + step, back = -1, scalar = 2, value = rank, scaled = -1;
	ncclRedOp_t twice;

	OK(ncclGroupStart());
	OK(ncclSend(&there, 1, ncclInt32, (rank + 1) % nranks, pairs, NULL));
	OK(ncclRecv(&back, 1, ncclInt32, (rank + nranks - 1) % nranks, pairs, NULL));
	OK(ncclRedOpCreatePreMulSum(&twice, &scalar, ncclInt32, ncclScalarHostImmediate, pairs));
	OK(ncclAllReduce(&value, &scaled, 1, ncclInt32, twice, pairs, NULL));
	OK(ncclRedOpDestroy(twice, pairs)); /* as torch does: inside the group, after its use */
	OK(ncclGroupEnd());
	fakeNcclStreamSynchronize(NULL);
	CHECK(back == (rank + nranks - 1) % nranks * 3 + step);
	CHECK(scaled == nranks * (nranks - 1));
}

static void *second(void *nothing)
{
	for (int step = 1; sem_wait(&asked) == 0 && !atomic_load(&ends); step++) {
		sum(other, step, (cudaStream_t)0x2000);
		sem_post(&done);
	}
	return nothing;
}

static void *watch(void *nothing)
{
	while (!atomic_load(&ends)) {
		ncclResult_t state;

		OK(ncclCommGetAsyncError(world, &state));
		OK(state);
		usleep(500);
	}
	return nothing;
}

static bool stops(void)
{
	char path[512];
	int32_t flag;

	snprintf(path, sizeof(path), "%s/stop", meeting);
	flag = access(path, F_OK) == 0;
	OK(ncclBroadcast(&flag, &flag, 1, ncclInt32, 0, world, NULL));
	fakeNcclStreamSynchronize(NULL);
	return flag;
}

int main(int count, char **arguments)
{
	pthread_t threads[2];

	CHECK(count == 4);
	meeting = arguments[1];
	rank = atoi(arguments[2]);
	nranks = atoi(arguments[3]);
	OK(ncclCommInitRank(&world, nranks, shared_id("id"), rank));
	OK(ncclCommSplit(world, 0, rank, &pairs, NULL));
	OK(ncclCommInitRank(&other, nranks, shared_id("other"), rank));
	sem_init(&asked, 0, 0);
	sem_init(&done, 0, 0);
	pthread_create(&threads[0], NULL, second, NULL);
	pthread_create(&threads[1], NULL, watch, NULL);
	for (int step = 1; !stops(); step++) {
		sem_post(&asked);
		sum(world, step, NULL);
		ring(step);
		sem_wait(&done);
		tell_step(step);
	}
	atomic_store(&ends, true);
	sem_post(&asked);
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
	OK(ncclCommDestroy(pairs));
	OK(ncclCommDestroy(other));
	OK(ncclCommDestroy(world));
	return 0;
}
