/* Counts captures as they begin and end, so that an operation queries its stream only while there is one.
 *
 * A graph launches its collectives without passing the gate, and destroying a communicator that a graph uses never returns.
 * So such a communicator is refused. Invariant: the calls and their results are the CUDA runtime's own; without a runtime
 * they return its error for a missing symbol.
 */
#define _GNU_SOURCE
#include "capture.h"

#include <dlfcn.h>
#include <stddef.h>

#include "core/shim.h"

#define EXPORT __attribute__((visibility("default")))
#define SYMBOL_NOT_FOUND 302 /* cudaErrorSharedObjectSymbolNotFound */

_Atomic int captures;

static void *runtime(const char *symbol)
{
	void *library = loaded_library("libcudart.so");
	void *found = library ? dlsym(library, symbol) : NULL;

	return found ? found : dlsym(RTLD_NEXT, symbol);
}

/* Looked up once each. */
#define FIND(pointer, symbol)                                                  \
	void *pointer;                                                             \
	do {                                                                       \
		static void *_Atomic found;                                            \
                                                                           \
		pointer = atomic_load_explicit(&found, memory_order_relaxed);          \
		if (!pointer) {                                                        \
			pointer = runtime(symbol);                                         \
			atomic_store_explicit(&found, pointer, memory_order_relaxed);      \
		}                                                                      \
	} while (0)

bool captures_under_way(void)
{
	return capture_under_way();
}

bool capture_has(uint64_t stream)
{
	int status = 0;
	FIND(function, "cudaStreamIsCapturing");

	return function && ((int (*)(uint64_t, int *))function)(stream, &status) == 0 && status != 0;
}

#define BEGIN(name, parameters, types, arguments)                \
	EXPORT int name parameters;                                  \
	int name parameters                                          \
	{                                                            \
		int result;                                              \
		FIND(function, #name);                                   \
                                                             \
		if (!function)                                           \
			return SYMBOL_NOT_FOUND;                             \
		atomic_fetch_add(&captures, 1);                          \
		result = ((int(*) types)function)arguments;              \
		if (result != 0)                                         \
			atomic_fetch_sub(&captures, 1);                      \
		return result;                                           \
	}
#define END(name)                                                                \
	EXPORT int name(void *stream, void *graph);                                  \
	int name(void *stream, void *graph)                                          \
	{                                                                            \
		int result;                                                              \
		FIND(function, #name);                                                   \
                                                                             \
		if (!function)                                                           \
			return SYMBOL_NOT_FOUND;                                             \
		result = ((int (*)(void *, void *))function)(stream, graph);             \
		/* Also a capture that went wrong is over. */                            \
		if (atomic_fetch_sub(&captures, 1) <= 0)                                 \
			atomic_fetch_add(&captures, 1);                                      \
		return result;                                                           \
	}

BEGIN(cudaStreamBeginCapture, (void *stream, int mode), (void *, int), (stream, mode))
BEGIN(cudaStreamBeginCapture_ptsz, (void *stream, int mode), (void *, int), (stream, mode))
BEGIN(cudaStreamBeginCaptureToGraph, (void *stream, void *graph, const void *on, const void *edges, size_t count, int mode),
      (void *, void *, const void *, const void *, size_t, int), (stream, graph, on, edges, count, mode))
BEGIN(cudaStreamBeginCaptureToGraph_ptsz,
      (void *stream, void *graph, const void *on, const void *edges, size_t count, int mode),
      (void *, void *, const void *, const void *, size_t, int), (stream, graph, on, edges, count, mode))
END(cudaStreamEndCapture)
END(cudaStreamEndCapture_ptsz)
