/* Gives back the RDMA devices that NCCL keeps after its last communicator: ends its event threads, closes the devices through
 * libibverbs, and then looks whether anything of RDMA is left in the process.
 *
 * Invariant: nothing is changed unless all that is open is NCCL's. From the first change on, the instances whose devices were
 * open are marked, and only a fresh one is used after that (real.h).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#include "core/shim.h"
#include "own_threads.h"
#include "rdma.h"
#include "real.h"

#define LOOK_AGAIN_US 2000
#define DEVICES "/dev/infiniband/"

/* What CRIU cannot dump, by how its name begins: devices of RDMA, the descriptors of their events, and NCCL's GDRCopy. */
static const char *const kinds[] = {DEVICES, "anon_inode:[infinibandevent]", "/dev/gdrdrv"};

static bool of_rdma(const char *name)
{
	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
		if (strncmp(name, kinds[i], strlen(kinds[i])) == 0)
			return true;
	return false;
}

static struct rdma_context *holder_of(int descriptor)
{
	struct rdma_context *entry;

	for (size_t i = 0; (entry = rdma_at(i)); i++)
		if (LOAD(&entry->context) && (entry->commands == descriptor || entry->events == descriptor))
			return entry;
	return NULL;
}

static int fail_held(struct nccl_job *job, const char *name, const struct rdma_context *entry, const char *state)
{
	return job_fails(job, EPERM, "%s is open and belongs to %s; %s", name,
			 entry ? rdma_library(entry) : "a library that is not known", state);
}

/* Finds a descriptor of RDMA, unless `closable` and NCCL's. */
static int check_descriptors(struct nccl_job *job, bool closable, const char *state)
{
	struct listing listing;
	int fd, failed = 0;

	if (listing_open(&listing, "/proc/self/fd"))
		return job_fails(job, EIO, "the process's descriptors cannot be listed; %s", state);
	while (!failed && (fd = listing_next(&listing)) >= 0) {
		char name[64];
		long bytes = KERNEL(SYS_readlinkat, listing.fd, listing.name, name, sizeof(name) - 1);
		const struct rdma_context *entry = holder_of(fd);

		name[bytes > 0 ? bytes : 0] = 0;
		if (of_rdma(name) && !(closable && entry && entry->instance))
			failed = fail_held(job, name, entry, state);
	}
	listing_close(&listing);
	return failed;
}

static int check_mappings(struct nccl_job *job, const char *state)
{
	struct mapping mapping;
	struct maps maps;
	int failed = 0;

	if (!maps_open(&maps))
		return job_fails(job, EIO, "the process's mappings cannot be listed; %s", state);
	while (!failed && maps_next(&maps, &mapping))
		if (of_rdma(mapping.path))
			failed = job_fails(job, EPERM, "%s is mapped, by a library that is not known; %s", mapping.path,
					   state);
	maps_close(&maps);
	return failed;
}

/* Returns a thread that still waits for events, after it was told again to end; 0 if there is none. */
static int thread_left(struct rdma_context *entry)
{
	int left = 0;

	for (int i = 0; i < RDMA_THREADS_MAX; i++) {
		int tid = LOAD(&entry->threads[i]);

		if (tid && thread_exists(tid)) {
			signal_thread(tid);
			left = tid;
		}
	}
	return left;
}

static int end_threads(struct nccl_job *job, struct rdma_context *entry)
{
	int tid;

	STORE(&entry->instance->released, 1);
	STORE(&entry->ending, 1);
	while ((tid = thread_left(entry))) {
		if (!job_in_time(job))
			return job_fails(
				job, ETIMEDOUT,
				"NCCL's thread %d, which waits for events of the RDMA device %s, did not end in time; the "
				"device is still open",
				tid, entry->device);
		pause_us(LOOK_AGAIN_US);
	}
	return 0;
}

int rdma_release(struct nccl_job *job)
{
	static const char nothing[] = "nothing was closed", closed[] = "NCCL's own devices were closed";
	struct rdma_context *entry;
	int failed = check_descriptors(job, true, nothing), count = 0;

	for (size_t i = 0; !failed && (entry = rdma_at(i)); i++)
		if (LOAD(&entry->context) && entry->instance)
			failed = end_threads(job, entry);
	for (size_t i = 0; !failed && (entry = rdma_at(i)); i++) {
		int status;

		if (!LOAD(&entry->context) || !entry->instance)
			continue;
		status = rdma_close(entry);
		if (status)
			failed = job_fails(job, EIO, "libibverbs cannot close the RDMA device %s: %s", entry->device,
					   strerror(status));
		count++;
	}
	if (!failed)
		failed = check_descriptors(job, false, count ? closed : nothing);
	return failed ? failed : check_mappings(job, count ? closed : nothing);
}
