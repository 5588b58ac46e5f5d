/* Copies the blocks to the stripe files and back (layout.c defines the layout), and releases their physical memory. */
#define _GNU_SOURCE
#include "stripes.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "handover.h"
#include "memory.h"

#define FIRST_LOOK_US 100 /* at a stripe that has to grow */
#define LAST_LOOK_US 2000

/* Transfers all bytes to or from the file. The system calls are made without libc, because the job is parked. */
static int transfer(struct worker *worker, long call, char *memory, uint64_t bytes, uint64_t at)
{
	while (bytes) {
		long done = KERNEL(call, worker->stripe, memory, bytes, at);

		if (done == -EINTR || done == -EAGAIN)
			continue;
		if (done <= 0)
			return worker_fails(worker, done ? (int)-done : EIO,
					    call == SYS_pwrite64 ? "pwrite fails with errno" : "pread fails with errno",
					    -done);
		memory += done;
		at += (uint64_t)done;
		bytes -= (uint64_t)done;
	}
	return 0;
}

static int store(struct worker *worker, char *slot, uint64_t bytes, uint64_t at)
{
	if (at + bytes > worker->mapped_bytes)
		return transfer(worker, SYS_pwrite64, slot, bytes, at);
	streaming_copy(worker->mapped + at, slot, bytes);
	return 0;
}

static int check_file(struct worker *worker)
{
	return handover_is_ours(worker->number) ?
		       0 :
		       worker_fails(worker, EBADF, "the job has closed a descriptor that is not its own:", worker->stripe);
}

/* A reader of the file finds what was copied and nothing after it. */
static int cut(struct worker *worker, uint64_t bytes)
{
	long status = check_file(worker);

	if (status)
		return (int)status;
	status = -KERNEL(SYS_ftruncate, worker->stripe, bytes);
	return status ? worker_fails(worker, (int)status, "ftruncate fails with errno", status) : 0;
}

static int begin_out(struct worker *worker, int slot, const struct chunk *chunk)
{
	int status = enter(worker, chunk->device);

	return status ? status :
			CUDA(worker, cuMemcpyDtoHAsync_v2, worker->slot[slot], chunk->address, chunk->bytes,
			     worker->stream[chunk->device][slot]);
}

/* Memory that the program freed during a capture is not copied; only its address has to be released. */
int drop_freed(struct worker *worker)
{
	for (size_t i = blocks_count(); i-- > 0;)
		if (block_at(i)->freed) {
			int status = enter(worker, block_at(i)->device);
			int answer = status ? 0 : backing_drop_freed(block_at(i));

			if (status || answer)
				return status ? status :
						worker_fails(worker, EIO, "cuMemUnmap or cuMemRelease answers", answer);
		}
	return 0;
}

/* Locking the driver has waited for all launched work. Waiting for a context here would invalidate its captures. */
int copy_out(struct worker *worker)
{
	struct cursor cursor = {.skip = worker->number};
	struct chunk chunk[SLOTS];
	bool more = next_chunk(&cursor, &chunk[0]);
	uint64_t done = 0;
	int status = check_file(worker);

	if (more && !status)
		status = begin_out(worker, 0, &chunk[0]);
	for (int slot = 0; more && !status; slot = !slot) {
		more = next_chunk(&cursor, &chunk[!slot]);
		if (more)
			status = begin_out(worker, !slot, &chunk[!slot]);
		if (!status)
			status = CUDA(worker, cuStreamSynchronize, worker->stream[chunk[slot].device][slot]);
		if (!status)
			status = worker_should_stop();
		if (!status)
			status = store(worker, worker->slot[slot], chunk[slot].bytes, done);
		if (!status) {
			done += chunk[slot].bytes;
			STORE(&snapshim_mailbox.device_done[worker->number], done);
		}
	}
	return status ? status : cut(worker, done);
}

/* Waits until the file has this many bytes. */
static int wait_for_stripe(struct worker *worker, uint64_t bytes)
{
	long pause = FIRST_LOOK_US;
	struct stat about = {0};

	for (;;) {
		int status = worker_should_stop();

		if (fstat(worker->stripe, &about) == 0 && (uint64_t)about.st_size >= bytes)
			return 0;
		if (status)
			return worker_fails(worker, status, "does not grow any more, bytes:", (long)about.st_size);
		pause_us(pause);
		pause = pause < LAST_LOOK_US ? pause * 2 : LAST_LOOK_US;
	}
}

static int finish_in(struct worker *worker, int slot, const struct chunk *chunk, uint64_t *done)
{
	int status = CUDA(worker, cuStreamSynchronize, worker->stream[chunk->device][slot]);

	if (!status) {
		*done += chunk->bytes;
		STORE(&snapshim_mailbox.device_done[worker->number], *done);
	}
	return status;
}

int copy_in(struct worker *worker)
{
	struct cursor cursor = {.skip = worker->number};
	struct chunk chunk[SLOTS] = {{0}}, next;
	uint64_t at = 0, done = 0;
	int status = 0, slot = 0;

	for (; !status && next_chunk(&cursor, &next); slot = !slot) {
		if (chunk[slot].bytes)
			status = finish_in(worker, slot, &chunk[slot], &done);
		chunk[slot] = next;
		if (!status)
			status = wait_for_stripe(worker, at + next.bytes);
		if (!status)
			status = transfer(worker, SYS_pread64, worker->slot[slot], next.bytes, at);
		if (!status)
			status = enter(worker, next.device);
		if (!status)
			status = CUDA(worker, cuMemcpyHtoDAsync_v2, next.address, worker->slot[slot], next.bytes,
				      worker->stream[next.device][slot]);
		if (!status)
			status = worker_should_stop();
		at += next.bytes;
	}
	for (int i = 0; i < SLOTS && !status; i++, slot = !slot)
		if (chunk[slot].bytes)
			status = finish_in(worker, slot, &chunk[slot], &done);
	return status;
}

/* Once the first block is away, only FILL can bring it back. So this continues after errors of the driver. */
int detach_all(struct worker *worker)
{
	int status = 0;

	for (size_t i = worker->number; i < blocks_count(); i += stripes.count)
		if (block_at(i)->striped && !block_at(i)->away) {
			int entered = enter(worker, block_at(i)->device);
			int answer = entered ? 0 : physical_detach(block_at(i));

			if (block_at(i)->away)
				ipc_offer(block_at(i), -1);
			if (answer)
				status = worker_fails(worker, EIO, "cuMemUnmap or cuMemRelease answers", answer);
			status = entered ? entered : status;
		}
	return status;
}

int attach_all(struct worker *worker)
{
	int status = 0, answer;

	for (size_t i = worker->number; i < blocks_count() && !status; i += stripes.count) {
		if (!block_at(i)->striped || !block_at(i)->away)
			continue;
		status = enter(worker, block_at(i)->device);
		answer = status ? 0 : physical_attach(block_at(i));
		if (answer)
			status = worker_fails(worker, driver_status(answer),
					      "cuMemCreate, cuMemMap or cuMemSetAccess answers", answer);
		if (!status)
			status = worker_should_stop();
	}
	return status;
}
