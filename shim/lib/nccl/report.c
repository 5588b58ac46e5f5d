/* Reports in JSON every communicator's counts, what waits at the gate, and what cannot be moved. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "gate.h"
#include "ids.h"
#include "registrations.h"
#include "own_threads.h"
#include "rdma.h"

struct text {
	char *bytes;
	size_t count, room;
	bool failed;
};

static void put(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct text *text, const char *format, ...)
{
	char piece[512];
	va_list list;
	int length;

	va_start(list, format);
	length = vsnprintf(piece, sizeof(piece), format, list);
	va_end(list);
	if (length >= (int)sizeof(piece))
		length = sizeof(piece) - 1;
	if (text->count + (size_t)length + 1 > text->room) {
		size_t room = 2 * text->room + sizeof(piece);
		char *bytes = realloc(text->bytes, room);

		text->failed = text->failed || !bytes;
		if (!bytes)
			return;
		text->bytes = bytes;
		text->room = room;
	}
	memcpy(text->bytes + text->count, piece, (size_t)length + 1);
	text->count += (size_t)length;
}

/* A comma before every element but the first of a list or object. */
static void separate(struct text *text)
{
	char last = text->count ? text->bytes[text->count - 1] : '[';

	if (last != '[' && last != '{')
		put(text, ",");
}

static void put_string(struct text *text, const char *string)
{
	put(text, "\"");
	for (; *string; string++)
		put(text, *string == '"' || *string == '\\' ? "\\%c" : (unsigned char)*string < ' ' ? " " : "%c", *string);
	put(text, "\"");
}

static void put_peers(struct text *text, const struct nccl_peers *peers)
{
	put(text, ",\"sent\":{");
	for (int i = 0; peers && i < peers->ranks; i++)
		if (atomic_load(&peers->with[i].sent)) {
			separate(text);
			put(text, "\"%d\":%lu", i, (unsigned long)atomic_load(&peers->with[i].sent));
		}
	put(text, "},\"received\":{");
	for (int i = 0; peers && i < peers->ranks; i++)
		if (atomic_load(&peers->with[i].received)) {
			separate(text);
			put(text, "\"%d\":%lu", i, (unsigned long)atomic_load(&peers->with[i].received));
		}
	put(text, "}");
}

static void put_refusals(struct text *text, struct nccl_comm *comm, ncclResult_t asynchronous)
{
	static const struct {
		unsigned int bit;
		const char *text;
	} refusals[] = {
		{REFUSED_CAPTURED, "its collectives are captured in a CUDA graph"},
		{REFUSED_WINDOW, "it has a symmetric-memory window"},
		{REFUSED_DEVICE_COMM, "it has a device communicator"},
		{REFUSED_ONE_SIDED, "it is used for one-sided operations"},
		{REFUSED_GROWN, "it has been grown"},
		{REFUSED_REVOKED, "it has been revoked"},
		{REFUSED_SUSPENDED, "it is suspended"},
	};
	unsigned int refused = atomic_load(&comm->refused);

	put(text, ",\"refused\":[");
	for (size_t i = 0; i < sizeof(refusals) / sizeof(*refusals); i++)
		if (refused & refusals[i].bit) {
			separate(text);
			put(text, "\"%s\"", refusals[i].text);
		}
	if (asynchronous != ncclSuccess && asynchronous != ncclInProgress) {
		separate(text);
		put(text, "\"NCCL reports error %d on it\"", (int)asynchronous);
	}
	put(text, "]");
}

/* Call it with the lock, so that the application's destroy does not remove the real one. */
static void put_comm(struct text *text, struct nccl_comm *comm)
{
	static const char *const states[] = {"unused",   "pending",   "live", "detaching",
					     "detached", "attaching", "lost", "ending"};
	static const char *const kinds[] = {"init", "split", "shrink", "grow", "init-all"};
	struct nccl_instance *instance = real_instance();
	ncclComm_t real = atomic_load(&comm->real);
	ncclResult_t asynchronous = ncclSuccess;

	if (real) {
		REAL(instance, ncclCommGetAsyncError, ncclResult_t (*)(ncclComm_t, ncclResult_t *))(real, &asynchronous);
		if (asynchronous == ncclSuccess)
			comm_learn(comm, real, instance);
	}
	separate(text);
	put(text, "{\"id\":\"%016lx\",\"kind\":\"%s\",\"nranks\":%d,\"rank\":%d,\"device\":%d,\"state\":\"%s\"",
	    (unsigned long)comm->id, kinds[comm->kind], atomic_load(&comm->nranks), atomic_load(&comm->rank),
	    atomic_load(&comm->device), states[atomic_load(&comm->state)]);
	put(text, ",\"blocking\":%s,\"in_progress\":%s,\"finalized\":%s,\"collectives\":%lu",
	    comm_blocks(comm) ? "true" : "false",
	    asynchronous == ncclInProgress || (!real && atomic_load(&comm->state) == LIVE) ? "true" : "false",
	    atomic_load(&comm->finalized) ? "true" : "false", (unsigned long)atomic_load(&comm->collectives));
	put_peers(text, atomic_load(&comm->peers));
	put(text, ",\"users\":[");
	for (int i = 0; i < USERS && atomic_load(&comm->users[i]); i++) {
		separate(text);
		put(text, "%d", atomic_load(&comm->users[i]));
	}
	put(text, "]");
	put_refusals(text, comm, asynchronous);
	put(text, "}");
}

static void put_channel(void *context, struct nccl_comm *comm, enum gate_channel channel, int peer, uint64_t count)
{
	separate(context);
	put(context, "[\"%016lx\",\"%c\",%d,%lu]", (unsigned long)comm->id, (char)channel, peer, (unsigned long)count);
}

static void put_threads(struct text *text)
{
	struct nccl_thread *thread;

	put(text, ",\"held\":[");
	for (thread = thread_first(); thread; thread = thread->next) {
		if (!thread->held)
			continue;
		separate(text);
		put(text, "{\"thread\":%d,\"group\":[", atomic_load(&thread->tid));
		for (size_t i = 0; i < thread->held_count; i++)
			gate_channels(&thread->held[i], put_channel, text);
		put(text, "]}");
	}
	put(text, "],\"calling\":[");
	for (thread = thread_first(); thread; thread = thread->next) {
		if (atomic_load(&thread->calling) == OUTSIDE)
			continue;
		separate(text);
		put(text, "{\"thread\":%d,\"function\":\"%s\"}", atomic_load(&thread->tid), atomic_load(&thread->function));
	}
	put(text, "]");
}

/* Threads that are left in NCCL after all communicators are down; -1 while one is up: counting takes a while, NCCL has threads
 * then anyway, and the driver of a move asks for reports many times before it takes communicators down. `unseen`: threads that
 * ran at that moment, so that they may or may not be NCCL's. */
static int own_threads(int *unseen)
{
	struct nccl_comm *comm;
	int count = 0;

	for (size_t i = 0; (comm = comm_at(i)); i++)
		if (atomic_load(&comm->real))
			return -1;
	for (const struct nccl_instance *one = real_instance(); one; one = one->before)
		if (one->text_to)
			count += threads_started_by(one, unseen);
	return count;
}

static void put_devices(struct text *text)
{
	const struct rdma_context *entry;

	put(text, ",\"rdma\":[");
	for (size_t i = 0; (entry = rdma_at(i)); i++) {
		if (!entry->context)
			continue;
		separate(text);
		put(text, "{\"device\":");
		put_string(text, entry->device);
		put(text, ",\"owner\":");
		put_string(text, entry->owner);
		put(text, ",\"nccl\":%s,\"descriptors\":[%d,%d]}", entry->instance ? "true" : "false", entry->commands,
		    entry->events);
	}
	put(text, "]");
}

int report(struct nccl_job *job)
{
	struct nccl_instance *instance = real_instance();
	const struct nccl_ended *ended;
	struct nccl_comm *comm;
	struct text text = {0};
	uint64_t before;
	int unseen = 0, left = own_threads(&unseen);

	nccl_lock(&before);
	put(&text,
	    "{\"version\":%d,\"instance\":%d,\"gate\":\"%s\",\"passed\":%lu,\"library\":", instance ? instance->version : 0,
	    instance ? instance->number : 0, atomic_load(&gate_word) == GATE_OPEN ? "open" : "closed",
	    (unsigned long)gate_passed());
	put_string(&text, real_path());
	put(&text, ",\"comms\":[");
	for (size_t i = 0; (comm = comm_at(i)); i++)
		if (atomic_load(&comm->state) != UNUSED)
			put_comm(&text, comm);
	put(&text, "],\"ended\":[");
	for (size_t i = 0; (ended = ended_at(i)); i++) {
		separate(&text);
		put(&text, "{\"id\":\"%016lx\",\"nranks\":%d,\"rank\":%d,\"state\":\"%s\",\"collectives\":%lu",
		    (unsigned long)ended->id, ended->nranks, ended->rank, ended->aborted ? "aborted" : "destroyed",
		    (unsigned long)ended->collectives);
		put_peers(&text, ended->peers);
		put(&text, "}");
	}
	put(&text, "]");
	put_threads(&text);
	put_devices(&text);
	nccl_unlock(&before);
	put(&text, ",\"nccl_threads\":%d,\"unseen_threads\":%d,\"ids_unused\":%d,\"allocations\":%d}", left, unseen,
	    ids_unused(), allocations());
	if (text.failed) {
		free(text.bytes);
		return job_fails(job, ENOMEM, "no memory for the report");
	}
	job->reply = text.bytes;
	job->reply_bytes = text.count;
	return 0;
}
