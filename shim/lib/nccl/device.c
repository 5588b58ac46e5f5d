/* Calls the driver by name, because the shim is built and loaded without CUDA. Invariant: it creates no context. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <string.h>

#include "core/shim.h"

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */
#define NON_BLOCKING 1
#define NOTHING_YET INT32_MIN

static void *function(const char *name)
{
	void *library = loaded_library("libcuda.so");

	return library ? dlsym(library, name) : NULL;
}

/* The driver's result, or 1 if it lacks the function. */
#define DRIVER(name, types, ...) \
	(function(name) ? ((int(*) types)function(name))(__VA_ARGS__) : 1)

bool device_enter(int device)
{
	unsigned int flags;
	void *context;
	int active = 0;

	if (device < 0 || DRIVER("cuDevicePrimaryCtxGetState", (int, unsigned int *, int *), device, &flags, &active) != 0 ||
	    !active)
		return false;
	if (DRIVER("cuDevicePrimaryCtxRetain", (void **, int), &context, device) != 0)
		return false;
	return DRIVER("cuCtxSetCurrent", (void *), context) == 0;
}

void device_leave(int device)
{
	DRIVER("cuCtxSetCurrent", (void *), NULL);
	DRIVER("cuDevicePrimaryCtxRelease_v2", (int), device);
}

bool device_bus_id(int device, char *into, int room)
{
	return DRIVER("cuDeviceGetPCIBusId", (char *, int, int), into, room, device) == 0;
}

void *device_context(void)
{
	void *context = NULL;

	return DRIVER("cuCtxGetCurrent", (void **), &context) == 0 ? context : NULL;
}

void device_set_context(void *context)
{
	DRIVER("cuCtxSetCurrent", (void *), context);
}

int device_synchronize(void)
{
	return DRIVER("cuCtxSynchronize", (void));
}

int device_pair_make(struct device_pair *pair, bool on_device, int32_t sent, int32_t host[2])
{
	int32_t numbers[2] = {sent, NOTHING_YET};
	int failed;

	*pair = (struct device_pair){.on_device = on_device};
	if (!on_device) {
		memcpy(host, numbers, sizeof(numbers));
		pair->memory = (uintptr_t)host;
		return 0;
	}
	failed = DRIVER("cuMemAlloc_v2", (uint64_t *, size_t), &pair->memory, sizeof(numbers));
	if (!failed)
		failed = DRIVER("cuMemcpyHtoD_v2", (uint64_t, const void *, size_t), pair->memory, numbers, sizeof(numbers));
	if (!failed)
		failed = DRIVER("cuStreamCreate", (void **, unsigned int), &pair->stream, NON_BLOCKING);
	return failed;
}

/* NCCL may write there concurrently without synchronisation, so any value may be read, also a partial one. */
__attribute__((no_sanitize("thread"))) static int32_t glance(const volatile int32_t *number)
{
	return *number;
}

int device_pair_look(struct device_pair *pair, int32_t expected, int32_t *value)
{
	int state;

	if (!pair->on_device) {
		*value = glance((int32_t *)(uintptr_t)pair->memory + 1);
		return *value == expected;
	}
	state = DRIVER("cuStreamQuery", (void *), pair->stream);
	if (state == 0)
		state = DRIVER("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), value, pair->memory + 4, sizeof(*value));
	return state == 0 ? 1 : state == NOT_READY ? 0 : -1;
}

void device_pair_free(struct device_pair *pair)
{
	if (!pair->on_device)
		return;
	if (pair->stream)
		DRIVER("cuStreamDestroy_v2", (void *), pair->stream);
	if (pair->memory)
		DRIVER("cuMemFree_v2", (uint64_t), pair->memory);
}
