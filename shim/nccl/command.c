/* The NCCL part of the mailbox. Each command runs on a thread of its own, made for it and never parked: NCCL's calls have
 * no deadline, so the control thread waits for that long and then says what has not come back.
 *
 * A command that was given up goes on until NCCL lets it; until then no other that calls NCCL is begun. What the gate is
 * told (close, targets, report, open) is always done.
 */
#define _GNU_SOURCE
#include "command.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "../shim.h"
#include "gate.h"

#define STACK_BYTES (1024 * 1024) /* NCCL's initialisation runs on it */
#define GRACE_NS 1000000000	  /* for what a cancelled attach still has to clean up */

static char *room; /* where the daemon writes requests */
static size_t room_bytes;
static char *reply; /* what the last command answered; the daemon reads it */
static struct nccl_job *_Atomic busy;

bool job_in_time(const struct nccl_job *job)
{
	return !atomic_load(&job->given_up) && now_ns() < job->until_ns;
}

int job_fails(struct nccl_job *job, int status, const char *format, ...)
{
	va_list list;

	if (job->status)
		return job->status;
	va_start(list, format);
	vsnprintf(job->words, sizeof(job->words), format, list);
	va_end(list);
	return job->status = status;
}

char *job_line(char **rest)
{
	char *line = *rest, *end = line + strcspn(line, "\n");

	if (!*line)
		return NULL;
	*rest = *end ? end + 1 : end;
	*end = 0;
	return line;
}

static int set_targets(struct nccl_job *job)
{
	size_t lines = 1, count = 0;
	struct gate_target *targets;
	char *rest = job->request, *line;

	for (const char *at = job->request; *at; at++)
		lines += *at == '\n';
	targets = calloc(lines, sizeof(*targets));
	if (!targets)
		return job_fails(job, ENOMEM, "no memory for %zu targets", lines);
	while ((line = job_line(&rest))) {
		unsigned long id, launched;
		char channel;
		int peer;

		if (sscanf(line, "%lx %c %d %lu", &id, &channel, &peer, &launched) != 4 || !strchr("csr", channel)) {
			free(targets);
			return job_fails(job, EINVAL, "not a target (ID c|s|r PEER COUNT): %.60s", line);
		}
		targets[count++] = (struct gate_target){id, (enum gate_channel)channel, peer, launched};
	}
	gate_set_targets(targets, count);
	return 0;
}

static int new_id(struct nccl_job *job)
{
	struct nccl_instance *instance = real_instance();
	ncclUniqueId id;
	ncclResult_t result;

	if (!instance)
		return job_fails(job, ENOENT, "the process has loaded no NCCL");
	result = REAL(instance, ncclGetUniqueId, ncclResult_t(*)(ncclUniqueId *))(&id);
	if (result != ncclSuccess)
		return job_fails(job, EIO, "ncclGetUniqueId answers %d", (int)result);
	job->reply = malloc(2 * sizeof(id) + 1);
	if (!job->reply)
		return job_fails(job, ENOMEM, "no memory");
	for (size_t i = 0; i < sizeof(id); i++)
		snprintf(job->reply + 2 * i, 3, "%02x", (unsigned char)id.internal[i]);
	job->reply_bytes = 2 * sizeof(id);
	return 0;
}

static int load_fresh(struct nccl_job *job)
{
	char words[WORDS_BYTES];
	struct nccl_comm *comm;
	int failed;

	for (size_t i = 0; (comm = comm_at(i)); i++) {
		int state = atomic_load(&comm->state);

		if (state != UNUSED && state != DETACHED && state != LOST)
			return job_fails(job, EBUSY, "communicator %016lx is not detached", (unsigned long)comm->id);
	}
	while (!gate_is_drained(words, sizeof(words))) {
		if (!job_in_time(job))
			return job_fails(job, ETIMEDOUT, "%s", words);
		pause_us(500);
	}
	failed = real_load_fresh(words, sizeof(words));
	return failed ? job_fails(job, failed, "%s", words) : 0;
}

static int act(struct nccl_job *job)
{
	switch (job->command) {
	case SNAPSHIM_NCCL_CLOSE:
		gate_close();
		return 0;
	case SNAPSHIM_NCCL_TARGETS:
		return set_targets(job);
	case SNAPSHIM_NCCL_REPORT:
		return report(job);
	case SNAPSHIM_NCCL_OPEN:
		gate_open();
		return 0;
	case SNAPSHIM_NCCL_DETACH:
		return detach(job);
	case SNAPSHIM_NCCL_NEW_ID:
		return new_id(job);
	case SNAPSHIM_NCCL_FRESH:
		return load_fresh(job);
	default:
		return attach(job);
	}
}

static void let_go(struct nccl_job *job)
{
	if (atomic_fetch_sub(&job->holders, 1) == 1) {
		free(job->reply);
		KERNEL(SYS_munmap, job, job->bytes);
	}
}

static void *run(void *given)
{
	struct nccl_job *job = given;
	int32_t *slot = NULL;
	uint64_t reserved = (uint64_t)1 << (SNAPSHIM_SIGNAL - 1);

	/* Never parked. NCCL's threads inherit the mask, and those can be. */
	for (int i = 0; i < SNAPSHIM_EXEMPT_MAX && !slot; i++) {
		int32_t nobody = 0;

		if (SWAP_IF(&snapshim_mailbox.exempt[i], &nobody, self_tid()))
			slot = &snapshim_mailbox.exempt[i];
	}
	free(job->stale);
	set_signal_mask(~reserved);
	prctl(PR_SET_NAME, "snapshim-nccl");
	act(job);
	if (atomic_load(&busy) == job)
		atomic_store(&busy, NULL);
	if (slot)
		STORE(slot, 0);
	STORE(&job->done, 1);
	wake_word(&job->done);
	let_go(job);
	return NULL;
}

static void *cancel(void *given)
{
	set_signal_mask(~((uint64_t)1 << (SNAPSHIM_SIGNAL - 1)));
	attach_cancel();
	let_go(given);
	return NULL;
}

static int start(void *(*routine)(void *), struct nccl_job *job)
{
	pthread_attr_t attributes;
	pthread_t thread;
	int status;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	atomic_fetch_add(&job->holders, 1);
	status = libc_create_thread()(&thread, &attributes, routine, job);
	pthread_attr_destroy(&attributes);
	if (status)
		let_go(job);
	return status;
}

static void wait_for(struct nccl_job *job, int64_t until_ns)
{
	while (!LOAD(&job->done) && now_ns() < until_ns)
		wait_word(&job->done, 0, until_ns - now_ns());
}

static struct nccl_job *make(uint32_t command, size_t bytes, int64_t timeout_ns)
{
	size_t whole = sizeof(struct nccl_job) + bytes + 1;
	long address = KERNEL(SYS_mmap, NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct nccl_job *job = (struct nccl_job *)address;

	if (address < 0 && address > -4096)
		return NULL;
	job->command = command;
	job->until_ns = now_ns() + timeout_ns;
	job->request = (char *)(job + 1);
	memcpy(job->request, room, bytes);
	job->bytes = whole;
	atomic_store(&job->holders, 1);
	return job;
}

static int make_room(uint64_t bytes)
{
	long address;

	if (bytes > room_bytes) {
		if (room)
			KERNEL(SYS_munmap, room, room_bytes);
		room = NULL;
		room_bytes = 0;
		address = KERNEL(SYS_mmap, NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (address < 0 && address > -4096)
			return (int)-address;
		room = (char *)address;
		room_bytes = bytes;
	}
	snapshim_mailbox.result[0] = (uintptr_t)room;
	return 0;
}

int nccl_obey(uint32_t command, int64_t timeout_ns)
{
	uint64_t bytes = snapshim_mailbox.argument[1];
	bool exclusive = command >= SNAPSHIM_NCCL_DETACH;
	struct nccl_job *job, *nobody = NULL;
	int status;

	if (command == SNAPSHIM_NCCL_ROOM)
		return make_room(bytes);
	if (bytes > room_bytes)
		return EINVAL;
	job = make(command, bytes, timeout_ns);
	if (!job)
		return ENOMEM;
	if (exclusive && !atomic_compare_exchange_strong(&busy, &nobody, job)) {
		say("an earlier command still waits for NCCL to come back");
		let_go(job);
		return EBUSY;
	}
	job->stale = reply;
	reply = NULL;
	status = start(run, job);
	if (status && exclusive)
		atomic_store(&busy, NULL);
	if (!status) {
		wait_for(job, job->until_ns);
		if (!LOAD(&job->done) && exclusive) {
			atomic_store(&job->given_up, true);
			if (command == SNAPSHIM_NCCL_ATTACH)
				start(cancel, job);
			wait_for(job, now_ns() + GRACE_NS);
		}
		status = LOAD(&job->done) ? job->status : ETIMEDOUT;
		if (LOAD(&job->done)) {
			say(job->words);
			reply = job->reply;
			job->reply = NULL;
			snapshim_mailbox.result[0] = (uintptr_t)reply;
			snapshim_mailbox.result[1] = job->reply_bytes;
		} else {
			say("NCCL does not come back");
		}
	}
	let_go(job);
	return status;
}

/* In a forked child: no thread of ours is there. */
void nccl_forget(void)
{
	atomic_store(&busy, NULL);
}
