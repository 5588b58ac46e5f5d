/* Finds CUDA's own functions, and the library of the caller, once for each caller's library.
 *
 * A program may have several runtimes, each in its own scope, so results are cached by the mapping of the caller's code.
 * Invariant: a cached result is found without a lock, so a call costs a few comparisons, does not wait for a thread inside
 * dlopen, and does not change dlerror(). The library of a cached function stays loaded.
 */
#define _GNU_SOURCE
#include "lookup.h"

#include <dlfcn.h>
#include <string.h>

#include "core/shim.h"

#define CALLERS_MAX 64

/* Entries are only added. */
static struct caller {
	struct code code;
	uint32_t state; /* 0: free or being written */
	bool nccl;
} callers[CALLERS_MAX];
static uint32_t callers_taken;

static bool is_in(const struct code *code, const void *address)
{
	return (uintptr_t)address >= code->from && (uintptr_t)address < code->to;
}

/* The mapping that contains the address, from /proc and not from the loader. */
static bool find_code(const void *address, struct code *code, bool *nccl)
{
	struct mapping mapping;
	struct maps maps;
	bool found = false;

	if (!maps_open(&maps))
		return false;
	while (!found && maps_next(&maps, &mapping)) {
		*code = (struct code){mapping.from, mapping.to};
		found = is_in(code, address);
	}
	maps_close(&maps);
	*nccl = found && strncmp(mapping.name, "libnccl", 7) == 0;
	return found;
}

bool lookup_is_nccl(const void *caller)
{
	struct code code;
	bool nccl = false;
	uint32_t at;

	for (int i = 0; i < CALLERS_MAX; i++)
		if (LOAD(&callers[i].state) && is_in(&callers[i].code, caller))
			return callers[i].nccl;
	if (!find_code(caller, &code, &nccl))
		return false;
	at = __atomic_fetch_add(&callers_taken, 1, __ATOMIC_ACQ_REL);
	if (at >= CALLERS_MAX) { /* later ones are looked up each time */
		STORE(&callers_taken, CALLERS_MAX);
		return nccl;
	}
	callers[at].code = code;
	callers[at].nccl = nccl;
	STORE(&callers[at].state, 1);
	return nccl;
}

/* Keeps the function's library loaded, so that the cached pointer stays valid. */
static void pin(void *function)
{
	Dl_info info;

	if (dladdr(function, &info) && info.dli_fname)
		(void)!dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

static void remember(struct lookup *lookup, void *function, const void *caller)
{
	struct found fresh = {.function = function};
	uint32_t at;
	bool nccl;

	if (!find_code(caller, &fresh.code, &nccl))
		return;
	at = __atomic_fetch_add(&lookup->taken, 1, __ATOMIC_ACQ_REL);
	if (at >= FOUND_MAX) {
		STORE(&lookup->taken, FOUND_MAX);
		return;
	}
	pin(function);
	lookup->found[at].code = fresh.code;
	STORE(&lookup->found[at].function, fresh.function);
}

void *lookup(struct lookup *lookup, const char *name, const char *file, const void *caller)
{
	void *function;

	for (int i = 0; i < FOUND_MAX; i++) {
		function = LOAD(&lookup->found[i].function);
		if (function && is_in(&lookup->found[i].code, caller))
			return function;
	}
	function = cuda_function(name, file, caller);
	if (function)
		remember(lookup, function, caller);
	return function;
}
