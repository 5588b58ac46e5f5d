/* CUDA's own functions, resolved as for the code that calls us. */
#ifndef SNAPSHIM_MEMORY_LOOKUP_H
#define SNAPSHIM_MEMORY_LOOKUP_H

#include <stdbool.h>
#include <stdint.h>

#define FOUND_MAX 16 /* libraries that call one function; further ones are looked up each time */

struct code { /* one mapping */
	uintptr_t from, to;
};

/* Results for one function, by the caller's mapping. Entries are only added. */
struct lookup {
	struct found {
		struct code code;
		void *function; /* NULL: free or being written */
	} found[FOUND_MAX];
	uint32_t taken;
};

void *lookup(struct lookup *lookup, const char *name, const char *file, const void *caller); /* NULL: there is none */
bool lookup_is_nccl(const void *caller);

/* The real function, as the caller would have resolved it. */
#define REAL_FOR(name, file, types, caller)                            \
	({                                                             \
		static struct lookup lookup_;                          \
                                                                       \
		(int(*) types)lookup(&lookup_, #name, file, (caller)); \
	})
#define REAL_FUNCTION(name, file, types) REAL_FOR(name, file, types, __builtin_return_address(0))

#endif
