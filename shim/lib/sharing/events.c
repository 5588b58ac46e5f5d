/* Events that processes share (cudaIpcGetEventHandle), without anything that the processes have in common on the GPU.
 *
 * The driver's checkpoint does not know what such events belong to. So a program gets an event of its process alone, and an event
 * that was exported, or opened, is always complete: exporting it waits for what it was recorded behind, and so does recording it
 * again, before the call returns. Another process can learn of a record only afterwards, and finds nothing to wait for. That is
 * what torch does itself when it has used up its events.
 *
 * Invariant: an event that was not made for other processes is CUDA's alone, and costs one comparison as long as none is shared.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "memory/ipc.h"
#include "memory/lookup.h"
#include "memory/memory.h"
#include "sharing.h"

#define DISABLE_TIMING 2u /* cudaEventDisableTiming, which events for other processes need */
#define INTERPROCESS 4u
#define LISTS 1024
#define EVENT_MARK "snapshim-events"

struct event_handle { /* replaces cudaIpcEventHandle_t */
	char mark[16];
	uint64_t unused[6];
};
_Static_assert(sizeof(struct event_handle) == 64, "CUDA's handles have 64 bytes");
_Static_assert(sizeof(EVENT_MARK) == sizeof(((struct event_handle *)0)->mark), "the mark fills its field");

static struct shared_event {
	void *event;
	bool complete; /* another process may have it, or has it */
	struct shared_event *next;
} *lists[LISTS];
static uint32_t known, complete; /* how many there are */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static struct shared_event **list_of(const void *event)
{
	return &lists[((uintptr_t)event >> 6 ^ (uintptr_t)event >> 16) % LISTS];
}

/* Under the lock. */
static struct shared_event *find(const void *event)
{
	struct shared_event *found = *list_of(event);

	while (found && found->event != event)
		found = found->next;
	return found;
}

static bool add(void *event, bool is_complete)
{
	struct shared_event *fresh = calloc(1, sizeof(*fresh));

	if (!fresh)
		return false;
	pthread_mutex_lock(&mutex);
	*fresh = (struct shared_event){event, is_complete, *list_of(event)};
	*list_of(event) = fresh;
	__atomic_add_fetch(&known, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&complete, is_complete, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&mutex);
	return true;
}

static void forget(const void *event)
{
	struct shared_event **place = list_of(event), *gone;

	if (!LOAD(&known))
		return;
	pthread_mutex_lock(&mutex);
	while (*place && (*place)->event != event)
		place = &(*place)->next;
	gone = *place;
	if (gone) {
		*place = gone->next;
		__atomic_sub_fetch(&known, 1, __ATOMIC_SEQ_CST);
		__atomic_sub_fetch(&complete, gone->complete, __ATOMIC_SEQ_CST);
	}
	pthread_mutex_unlock(&mutex);
	free(gone);
}

/* Waits for what the event was recorded behind, without an effect on captures. */
static int wait_for(void *event)
{
	int mode = RELAXED, status;

	if (driver()->cuThreadExchangeStreamCaptureMode)
		driver()->cuThreadExchangeStreamCaptureMode(&mode);
	status = driver()->cuEventSynchronize(event);
	if (driver()->cuThreadExchangeStreamCaptureMode)
		driver()->cuThreadExchangeStreamCaptureMode(&mode);
	return status;
}

/* Asks the driver: captures that were begun through it are not counted (nccl/capture.c). */
static bool is_captured(void *stream)
{
	int capturing = 0;

	return driver()->cuStreamIsCapturing && (driver()->cuStreamIsCapturing(stream, &capturing) || capturing);
}

/* The program has recorded it. What a capture records becomes part of a graph, and nothing to wait for. */
static int recorded(void *event, void *stream)
{
	struct shared_event *found;
	bool shared;

	if (!LOAD(&complete) || !driver())
		return 0;
	pthread_mutex_lock(&mutex);
	found = find(event);
	shared = found && found->complete;
	pthread_mutex_unlock(&mutex);
	return shared && !is_captured(stream) ? wait_for(event) : 0;
}

static bool usable(void)
{
	return driver() && driver()->cuEventCreate && driver()->cuEventSynchronize && driver()->cuEventDestroy_v2;
}

static bool for_others(unsigned int flags)
{
	return called_by_program() && (flags & (INTERPROCESS | DISABLE_TIMING)) == (INTERPROCESS | DISABLE_TIMING);
}

bool memory_event_get(void *handle, void *event, int *status)
{
	struct event_handle made = {.mark = EVENT_MARK};
	struct shared_event *found;

	if (!handle || !LOAD(&known) || !called_by_program() || !usable())
		return false;
	pthread_mutex_lock(&mutex);
	found = find(event);
	if (found && !found->complete) { /* before the wait: a record that follows must be waited for, too */
		found->complete = true;
		__atomic_add_fetch(&complete, 1, __ATOMIC_SEQ_CST);
	}
	pthread_mutex_unlock(&mutex);
	if (!found)
		return false;
	*status = wait_for(event);
	if (!*status)
		memcpy(handle, &made, sizeof(made));
	return true;
}

bool memory_event_open(void **event, const void *handle, const void *caller, int *status)
{
	if (memcmp(handle, EVENT_MARK, sizeof(EVENT_MARK)) != 0)
		return false;
	*status = CUDA_INVALID_VALUE;
	if (!event || (caller && !enter_runtime_device(caller)) || !usable())
		return true;
	*status = driver()->cuEventCreate(event, DISABLE_TIMING);
	if (!*status && !add(*event, true)) {
		driver()->cuEventDestroy_v2(*event);
		*status = CUDA_OUT_OF_MEMORY;
	}
	return true;
}

/* In a forked child. The records are its parent's, and stay where they are. */
void sharing_forget(void)
{
	memset(lists, 0, sizeof(lists));
	known = complete = 0;
	mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* ---------------------------------------------------------------- the interposed calls */

#define CREATE_EVENT(name, file, not_found)                                                              \
	SNAPSHIM_EXPORT int name(void **event, unsigned int flags);                                      \
	int name(void **event, unsigned int flags)                                                       \
	{                                                                                                \
		int (*real)(void **, unsigned int) = REAL_FUNCTION(name, file, (void **, unsigned int)); \
		bool ours = for_others(flags);                                                           \
		int status;                                                                              \
                                                                                                         \
		if (!real)                                                                               \
			return not_found;                                                                \
		status = PASS_ON(real(event, ours ? flags & ~INTERPROCESS : flags));                     \
		if (status == 0 && ours && !add(*event, false))                                          \
			return CUDA_OUT_OF_MEMORY;                                                       \
		return status;                                                                           \
	}
#define DESTROY_EVENT(name, file, not_found)                                     \
	SNAPSHIM_EXPORT int name(void *event);                                   \
	int name(void *event)                                                    \
	{                                                                        \
		int (*real)(void *) = REAL_FUNCTION(name, file, (void *));       \
                                                                                 \
		if (!real)                                                       \
			return not_found;                                        \
		forget(event);                                                   \
		return PASS_ON(real(event));                                     \
	}
#define RECORD_EVENT(name, file, not_found, parameters, arguments)       \
	SNAPSHIM_EXPORT int name parameters;                             \
	int name parameters                                              \
	{                                                                \
		int(*real) parameters = REAL_FUNCTION(name, file, parameters); \
		int status = real ? PASS_ON(real arguments) : not_found; \
                                                                         \
		return status ? status : recorded(event, stream);        \
	}

CREATE_EVENT(cudaEventCreateWithFlags, CUDA_RUNTIME, RUNTIME_NOT_FOUND)
CREATE_EVENT(cuEventCreate, CUDA_DRIVER, CUDA_NOT_FOUND)
DESTROY_EVENT(cudaEventDestroy, CUDA_RUNTIME, RUNTIME_NOT_FOUND)
DESTROY_EVENT(cuEventDestroy_v2, CUDA_DRIVER, CUDA_NOT_FOUND)

RECORD_EVENT(cudaEventRecord, CUDA_RUNTIME, RUNTIME_NOT_FOUND, (void *event, void *stream), (event, stream))
RECORD_EVENT(cudaEventRecord_ptsz, CUDA_RUNTIME, RUNTIME_NOT_FOUND, (void *event, void *stream), (event, stream))
RECORD_EVENT(cudaEventRecordWithFlags, CUDA_RUNTIME, RUNTIME_NOT_FOUND, (void *event, void *stream, unsigned int flags),
	     (event, stream, flags))
RECORD_EVENT(cudaEventRecordWithFlags_ptsz, CUDA_RUNTIME, RUNTIME_NOT_FOUND, (void *event, void *stream, unsigned int flags),
	     (event, stream, flags))
RECORD_EVENT(cuEventRecord, CUDA_DRIVER, CUDA_NOT_FOUND, (void *event, void *stream), (event, stream))
RECORD_EVENT(cuEventRecord_ptsz, CUDA_DRIVER, CUDA_NOT_FOUND, (void *event, void *stream), (event, stream))
RECORD_EVENT(cuEventRecordWithFlags, CUDA_DRIVER, CUDA_NOT_FOUND, (void *event, void *stream, unsigned int flags),
	     (event, stream, flags))
RECORD_EVENT(cuEventRecordWithFlags_ptsz, CUDA_DRIVER, CUDA_NOT_FOUND, (void *event, void *stream, unsigned int flags),
	     (event, stream, flags))
