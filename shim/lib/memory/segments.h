/* Replacements for driver functions that a program gets from the runtime; arguments and results are the driver's. */
#ifndef SNAPSHIM_MEMORY_SEGMENTS_H
#define SNAPSHIM_MEMORY_SEGMENTS_H

#include "memory.h"

enum {
	CREATE,
	RELEASE,
	MAP,
	UNMAP,
	SET_ACCESS,
	RETAIN,
	PROPERTIES,
	EXPORT,
	BIND_MEMORY,
	BIND_ADDRESS,
	RANGE_HANDLE,
	ALLOCATE,
	FREE,
	FUNCTIONS
};

extern void *segments_real[FUNCTIONS]; /* what the runtime returned for it */
#define REAL(number, types) ((int(*) types)LOAD(&segments_real[number]))

/* segments.c */
int segments_create(uint64_t *handle, size_t bytes, const struct cuda_property *property, unsigned long long flags);
int segments_release(uint64_t handle);
int segments_map(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
int segments_unmap(uint64_t address, size_t bytes);
int segments_set_access(uint64_t address, size_t bytes, const struct cuda_access *access, size_t count);
/* The driver's handle for one of ours; any other handle unchanged. With `shares` the memory is not offloaded any more. */
uint64_t segments_translate(uint64_t ours, bool shares);

/* shared.c */
int segments_retain(uint64_t *handle, uint64_t address);
int segments_properties(struct cuda_property *property, uint64_t handle);
int segments_export(void *into, uint64_t handle, int kind, unsigned long long flags);
int segments_bind_memory(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g);
int segments_bind_address(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g);
int segments_range_handle(void *handle, uint64_t address, size_t bytes, int kind, unsigned long long flags);

#endif
