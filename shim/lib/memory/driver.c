/* Finds the driver's own functions. Invariant: it loads no CUDA library that the job did not load, and finds the driver's
 * functions, never our symbols of the same names. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "core/shim.h"

static struct driver *found;

static struct driver *look(void *library)
{
	struct driver *fresh = calloc(1, sizeof(*fresh));
	bool whole = fresh != NULL;

	if (!fresh)
		return NULL;
#define X(name, types) fresh->name = (int(*) types)dlsym(library, #name);
	DRIVER_NEEDED(X)
	DRIVER_USEFUL(X)
#undef X
#define X(name, types) whole = whole && fresh->name;
	DRIVER_NEEDED(X)
#undef X
	if (whole)
		return fresh;
	free(fresh);
	return NULL;
}

const struct driver *driver(void)
{
	struct driver *known = LOAD(&found), *none = NULL;
	void *library;

	if (known)
		return known;
	library = loaded_library(CUDA_DRIVER);
	known = library ? look(library) : NULL;
	if (known && !SWAP_IF(&found, &none, known)) { /* another thread was faster */
		free(known);
		known = none;
	} else if (known) {
		return known; /* the library handle stays open, so it stays loaded */
	}
	if (library)
		dlclose(library);
	return known;
}
