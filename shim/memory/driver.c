/* Finds the driver's own functions. Invariant: nothing of CUDA is loaded that the job did not load, and what is called here
 * is the driver, never our own symbol of that name. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>

#include "../shim.h"

static struct driver found;
static bool complete;

const struct driver *driver(void)
{
	struct driver fresh = {0};
	bool whole = true;
	void *library;

	if (LOAD(&complete))
		return &found;
	library = cuda_library(CUDA_DRIVER);
	if (!library)
		return NULL;
#define X(name, types) fresh.name = (int(*) types)dlsym(library, #name);
	DRIVER_NEEDED(X)
	DRIVER_USEFUL(X)
#undef X
#define X(name, types) whole = whole && fresh.name;
	DRIVER_NEEDED(X)
#undef X
	if (!whole) {
		dlclose(library);
		return NULL;
	}
	/* Two threads may do this at once, and write the same; the library stays open, so it stays. */
#define X(name, types) __atomic_store_n(&found.name, fresh.name, __ATOMIC_RELAXED);
	DRIVER_NEEDED(X)
	DRIVER_USEFUL(X)
#undef X
	STORE(&complete, true);
	return &found;
}
