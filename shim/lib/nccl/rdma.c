/* Learns which RDMA devices NCCL has open. NCCL never closes them: they outlive its last communicator.
 *
 * Three functions of libibverbs are wrapped: those that open and close a device, and the one in which NCCL's threads wait for
 * asynchronous events. Programs that are linked with libibverbs find the wrappers because this library is preloaded. NCCL
 * looks the functions up with dlvsym in a library that it has opened itself, so dlvsym is wrapped as well. dlsym is not: its
 * result may depend on its caller, and far more code uses it. A library that uses it to open a device is not recognised, and
 * the device counts as one of an unknown owner, which is refused.
 *
 * Invariant: a wrapper does what libibverbs does. Only NCCL's threads wait in a different call for the same descriptor, so
 * that they can be told to end. A second libibverbs in one process is left alone.
 */
#define _GNU_SOURCE
#include "rdma.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#include "core/shim.h"
#include "real.h"
#include "threads.h"

#define LIBRARY "libibverbs.so"
#define VERSION "IBVERBS_1.1"
#define OTHER_READS_US 100

/* The beginnings of libibverbs' structs, which have been the same since version 1.1 of its interface. */
struct ibv_device {
	void *operations[2];
	int kind, transport;
	char name[64];
};
struct ibv_context {
	struct ibv_device *device;
	void *operations[32];
	int commands, events;
};
struct ibv_async_event;

SNAPSHIM_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device);
SNAPSHIM_EXPORT int ibv_close_device(struct ibv_context *context);
SNAPSHIM_EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event);

static struct rdma_context table[RDMA_CONTEXTS_MAX];

enum wrapped { OPEN_DEVICE, CLOSE_DEVICE, GET_ASYNC_EVENT, WRAPPED };
static void *real_functions[WRAPPED];
static void *(*next_dlvsym)(void *, const char *, const char *);

static void *wrapper(enum wrapped number)
{
	switch (number) {
	case OPEN_DEVICE:
		return (void *)ibv_open_device;
	case CLOSE_DEVICE:
		return (void *)ibv_close_device;
	default:
		return (void *)ibv_get_async_event;
	}
}

static const char *const names[WRAPPED] = {"ibv_open_device", "ibv_close_device", "ibv_get_async_event"};

static void *next_version(void *handle, const char *name, const char *version)
{
	if (!LOAD(&next_dlvsym))
		STORE(&next_dlvsym, (void *(*)(void *, const char *, const char *))dlsym(RTLD_NEXT, "dlvsym"));
	return next_dlvsym(handle, name, version);
}

/* Our function instead of libibverbs'; NULL: the caller gets what it asked for. */
static void *replacement(void *handle, const char *name, const char *version)
{
	for (int i = 0; i < WRAPPED; i++) {
		void *found, *none = NULL;

		if (strcmp(name, names[i]) != 0)
			continue;
		found = next_version(handle, name, version);
		if (!found || found == wrapper((enum wrapped)i))
			return NULL;
		return SWAP_IF(&real_functions[i], &none, found) || none == found ? wrapper((enum wrapped)i) : NULL;
	}
	return NULL;
}

/* The last call must be a jump: for RTLD_NEXT, libc looks at the address that its caller returns to. The runtime of a
 * sanitizer calls this before it is initialised. */
#ifdef __clang__
#define LAST_CALL_IS_A_JUMP
#else
#define LAST_CALL_IS_A_JUMP __attribute__((optimize("O2"), no_sanitize("address", "thread")))
#endif
LAST_CALL_IS_A_JUMP SNAPSHIM_EXPORT void *dlvsym(void *restrict handle, const char *restrict name,
						 const char *restrict version)
{
	bool verbs = name[0] == 'i' && name[1] == 'b' && name[2] == 'v';
	void *ours = verbs ? replacement(handle, name, version) : NULL;

	if (ours)
		return ours;
	if (!LOAD(&next_dlvsym))
		STORE(&next_dlvsym, (void *(*)(void *, const char *, const char *))dlsym(RTLD_NEXT, "dlvsym"));
	return next_dlvsym(handle, name, version);
}

/* For programs that are linked with libibverbs: it is in the global scope, or beside the library that was linked with it. */
static void *real_function(enum wrapped number)
{
	void *found = LOAD(&real_functions[number]), *library;

	if (found)
		return found;
	found = next_version(RTLD_NEXT, names[number], VERSION);
	if (!found && (library = loaded_library(LIBRARY))) {
		found = next_version(library, names[number], VERSION);
		dlclose(library); /* it was loaded before, and stays */
	}
	if (found)
		STORE(&real_functions[number], found);
	return found;
}

static struct rdma_context *find(const void *context)
{
	for (int i = 0; i < RDMA_CONTEXTS_MAX; i++)
		if (LOAD(&table[i].context) == context)
			return &table[i];
	return NULL;
}

static void remember(struct ibv_context *context, const void *caller)
{
	struct nccl_instance *instance = real_containing(caller);
	struct rdma_context *entry;
	uint64_t before;
	Dl_info info;
	/* A fresh copy of NCCL is loaded from a descriptor and has no name. dladdr takes the dynamic linker's lock, which a
	 * thread that waits for ours may have. */
	const char *owner = instance ? real_path() : dladdr(caller, &info) && info.dli_fname ? info.dli_fname : "?";

	nccl_lock(&before);
	entry = find(NULL);
	if (entry) { /* if there is none left, the device has no known owner */
		memset(entry, 0, sizeof(*entry));
		entry->instance = instance;
		entry->commands = context->commands;
		entry->events = context->events;
		snprintf(entry->device, sizeof(entry->device), "%.63s", context->device ? context->device->name : "?");
		snprintf(entry->owner, sizeof(entry->owner), "%s", owner);
		STORE(&entry->context, context);
	}
	nccl_unlock(&before);
}

static void forget(const void *context)
{
	struct rdma_context *entry;
	uint64_t before;

	nccl_lock(&before);
	entry = find(context);
	if (entry)
		STORE(&entry->context, NULL);
	nccl_unlock(&before);
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct ibv_context *(*call)(struct ibv_device *) = real_function(OPEN_DEVICE);
	struct ibv_context *context;

	if (!call) {
		errno = ENOSYS;
		return NULL;
	}
	context = call(device);
	if (context)
		remember(context, __builtin_return_address(0));
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	int (*call)(struct ibv_context *) = real_function(CLOSE_DEVICE);

	if (!call) {
		errno = ENOSYS;
		return -1;
	}
	forget(context);
	return call(context);
}

/* Enters the calling thread among those that wait for the events of a device. */
static void enlist(struct rdma_context *entry)
{
	int tid = self_tid();

	for (int i = 0; i < RDMA_THREADS_MAX; i++)
		if (LOAD(&entry->threads[i]) == tid)
			return;
	for (int i = 0; i < RDMA_THREADS_MAX; i++) {
		int none = 0;

		if (SWAP_IF(&entry->threads[i], &none, tid))
			return;
	}
}

static bool has_event(int descriptor, int timeout_ms)
{
	struct pollfd watched = {.fd = descriptor, .events = POLLIN};

	return poll(&watched, 1, timeout_ms) > 0;
}

/* libibverbs blocks in a read, which the shim's signal does not end: it is restarted. poll is never restarted. NCCL's thread
 * ends by itself when this call fails. */
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	int (*call)(struct ibv_context *, struct ibv_async_event *) = real_function(GET_ASYNC_EVENT);
	struct rdma_context *entry = find(context);

	if (!call) {
		errno = ENOSYS;
		return -1;
	}
	if (!entry || !entry->instance)
		return call(context, event);
	enlist(entry);
	while (!LOAD(&entry->ending)) {
		uint32_t none = 0;
		bool read;
		int result = -1;

		if (!has_event(context->events, -1))
			continue;
		if (!SWAP_IF(&entry->reading, &none, 1)) { /* several threads of one context: the event may be another's */
			pause_us(OTHER_READS_US);
			continue;
		}
		read = has_event(context->events, 0);
		if (read)
			result = call(context, event);
		STORE(&entry->reading, 0);
		if (read)
			return result;
	}
	errno = EINTR;
	return -1;
}

struct rdma_context *rdma_at(size_t number)
{
	return number < RDMA_CONTEXTS_MAX ? &table[number] : NULL;
}

int rdma_close(struct rdma_context *entry)
{
	int (*call)(struct ibv_context *) = real_function(CLOSE_DEVICE);
	void *context = LOAD(&entry->context);

	if (!call)
		return ENOSYS;
	forget(context);
	return call(context) ? (errno ? errno : EIO) : 0;
}

const char *rdma_library(const struct rdma_context *entry)
{
	const char *slash = strrchr(entry->owner, '/');

	return slash ? slash + 1 : entry->owner;
}

/* In a forked child: it cannot use NCCL, and CRIU cannot dump a process that has such a descriptor. The pages of a device
 * are not inherited. */
void rdma_forget(void)
{
	for (int i = 0; i < RDMA_CONTEXTS_MAX; i++) {
		struct rdma_context *entry = &table[i];

		if (!entry->context || !entry->instance)
			continue;
		KERNEL(SYS_close, entry->commands);
		KERNEL(SYS_close, entry->events);
		entry->context = NULL;
	}
}
