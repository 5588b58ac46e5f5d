/* Interposes the runtime's lookup of driver functions by name, which returns our replacements for some of them. */
#define _GNU_SOURCE
#include <string.h>

#include "lookup.h"
#include "segments.h"

static int allocate(uint64_t *address, size_t bytes)
{
	return backing_allocate(address, bytes) ? 0 : PASS_ON(REAL(ALLOCATE, (uint64_t *, size_t))(address, bytes));
}

static int free_(uint64_t address)
{
	return backing_free(address) ? 0 : PASS_ON(REAL(FREE, (uint64_t))(address));
}

static const struct {
	const char *name;
	void *function;
} stand_ins[FUNCTIONS] = {
	[CREATE] = {"cuMemCreate", segments_create},
	[RELEASE] = {"cuMemRelease", segments_release},
	[MAP] = {"cuMemMap", segments_map},
	[UNMAP] = {"cuMemUnmap", segments_unmap},
	[SET_ACCESS] = {"cuMemSetAccess", segments_set_access},
	[RETAIN] = {"cuMemRetainAllocationHandle", segments_retain},
	[PROPERTIES] = {"cuMemGetAllocationPropertiesFromHandle", segments_properties},
	[EXPORT] = {"cuMemExportToShareableHandle", segments_export},
	[BIND_MEMORY] = {"cuMulticastBindMem", segments_bind_memory},
	[BIND_ADDRESS] = {"cuMulticastBindAddr", segments_bind_address},
	[RANGE_HANDLE] = {"cuMemGetHandleForAddressRange", segments_range_handle},
	[ALLOCATE] = {"cuMemAlloc", allocate},
	[FREE] = {"cuMemFree", free_},
};

static void *stand_in(const char *name, void *function)
{
	for (int i = 0; i < FUNCTIONS; i++)
		if (strcmp(name, stand_ins[i].name) == 0) {
			STORE(&segments_real[i], function);
			return stand_ins[i].function;
		}
	return function;
}

/* Older runtimes have no `found`: then it is an arbitrary register value, which is passed on unchanged. */
#define ENTRY_POINT(name, parameters, arguments)                                                        \
	SNAPSHIM_EXPORT int name parameters;                                                            \
	int name parameters                                                                             \
	{                                                                                               \
		int(*call) parameters = REAL_FUNCTION(name, CUDA_RUNTIME, parameters);                  \
		int status = call ? call arguments : RUNTIME_NOT_FOUND;                                 \
                                                                                                        \
		if (status == 0 && symbol && function && *function && driver() &&                      \
		    backing_serves(__builtin_return_address(0)))                                        \
			*function = stand_in(symbol, *function);                                        \
		return status;                                                                          \
	}

ENTRY_POINT(cudaGetDriverEntryPoint, (const char *symbol, void **function, unsigned long long flags, void *found),
	    (symbol, function, flags, found))
ENTRY_POINT(cudaGetDriverEntryPoint_ptsz, (const char *symbol, void **function, unsigned long long flags, void *found),
	    (symbol, function, flags, found))
ENTRY_POINT(cudaGetDriverEntryPointByVersion,
	    (const char *symbol, void **function, unsigned int version, unsigned long long flags, void *found),
	    (symbol, function, version, flags, found))
ENTRY_POINT(cudaGetDriverEntryPointByVersion_ptsz,
	    (const char *symbol, void **function, unsigned int version, unsigned long long flags, void *found),
	    (symbol, function, version, flags, found))
