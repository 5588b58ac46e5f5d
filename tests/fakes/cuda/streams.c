/* Streams and events. Copies are done when their stream is waited for (copies.c). The only kernel keeps every stream
 * busy. If the process uses the fake NCCL (tests/fakes/nccl), that keeps its streams busy. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "call.h"
#include "copies.h"

#define MAX_STREAMS 256
#define MAX_EVENTS 4096
#define EVENT_DISABLE_TIMING 2
#define EVENT_INTERPROCESS 4

static struct fake_stream {
	_Atomic int used, captures;
} streams[MAX_STREAMS];

static struct fake_event {
	_Atomic int used;
	CUstream stream; /* in which it was last recorded */
	bool interprocess;
} events[MAX_EVENTS];

static int take(_Atomic int *used)
{
	int vacant = 0;

	return atomic_compare_exchange_strong(used, &vacant, 1);
}

static CUresult make_stream(CUstream *stream)
{
	if (current_gpu() < 0)
		return CUDA_ERROR_INVALID_CONTEXT;
	for (int i = 0; i < MAX_STREAMS; i++) {
		if (!take(&streams[i].used))
			continue;
		*stream = &streams[i];
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* 0, 1 and 2 are the default streams. */
static bool is_stream(CUstream stream)
{
	return (uintptr_t)stream <= 2 || (stream >= streams && stream < streams + MAX_STREAMS && stream->used);
}

static CUresult make_event(CUevent *event, unsigned int flags)
{
	if (flags & EVENT_INTERPROCESS && !(flags & EVENT_DISABLE_TIMING))
		return CUDA_ERROR_INVALID_VALUE;
	if (current_gpu() < 0)
		return CUDA_ERROR_INVALID_CONTEXT;
	for (int i = 0; i < MAX_EVENTS; i++) {
		if (!take(&events[i].used))
			continue;
		events[i].interprocess = flags & EVENT_INTERPROCESS;
		*event = &events[i];
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_OUT_OF_MEMORY;
}

static bool is_event(CUevent event)
{
	return event >= events && event < events + MAX_EVENTS && event->used;
}

static bool collective_under_way(CUstream stream)
{
	int (*query)(void *) = (int (*)(void *))dlsym(RTLD_DEFAULT, "fakeNcclStreamQuery");

	return stream != EVERY_STREAM && query && query(stream) != 0;
}

static CUresult wait_for_work(CUstream stream)
{
	while (process_busy() || collective_under_way(stream))
		sleep_ms(1);
	return copies_finish(stream);
}

static CUresult look_for_work(CUstream stream)
{
	return process_busy() || collective_under_way(stream) ? CUDA_ERROR_NOT_READY : copies_finish(stream);
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	(void)flags;
	CALL_ALONE(result = make_stream(stream););
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	(void)priority;
	return cuStreamCreate(stream, flags);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
	CALL_ALONE(if ((uintptr_t)stream > 2 && is_stream(stream)) {
		result = copies_finish(stream);
		stream->used = 0;
	} else result = CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
	CALL(result = is_stream(stream) ? wait_for_work(stream) : CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
	CALL(result = is_stream(stream) ? look_for_work(stream) : CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	(void)flags;
	CALL(result = is_stream(stream) && is_event(event) ? copies_finish(event->stream) : CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuCtxSynchronize(void)
{
	CALL(result = current_gpu() < 0 ? CUDA_ERROR_INVALID_CONTEXT : wait_for_work(EVERY_STREAM););
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	CALL(result = make_event(event, flags););
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
	CALL(if (is_event(event) && is_stream(stream)) event->stream = stream; else result = CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuEventQuery(CUevent event)
{
	CALL(result = is_event(event) ? look_for_work(event->stream) : CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
	CALL(result = is_event(event) ? wait_for_work(event->stream) : CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
	CALL(if (is_event(event)) event->used = 0; else result = CUDA_ERROR_INVALID_HANDLE;);
}

/* Nothing is captured: only the stream says so. The default stream can be captured, too, unlike a real one. */
static _Atomic int default_captures;

static _Atomic int *captures_of(CUstream stream)
{
	return (uintptr_t)stream <= 2 ? &default_captures : &stream->captures;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
	(void)mode;
	CALL(if (is_stream(stream)) * captures_of(stream) = 1; else result = CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, void **graph)
{
	CALL(*graph = NULL; if (is_stream(stream)) * captures_of(stream) = 0; else result = CUDA_ERROR_INVALID_HANDLE;);
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
	CALL(if (is_stream(stream)) *status = *captures_of(stream); else result = CUDA_ERROR_INVALID_HANDLE;);
}

/* Handles of events can be made, but not opened. */
EXPORT CUresult cuIpcGetEventHandle(CUipcMemHandle *handle, CUevent event)
{
	CALL(memset(handle, 0, sizeof *handle);
	     if (!is_event(event) || !event->interprocess) result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *event, CUipcMemHandle handle)
{
	(void)event, (void)handle;
	CALL(result = CUDA_ERROR_NOT_SUPPORTED;);
}

bool streams_have_interprocess_events(void)
{
	for (int i = 0; i < MAX_EVENTS; i++)
		if (events[i].used && events[i].interprocess)
			return true;
	return false;
}
