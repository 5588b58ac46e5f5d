/* The driver's calls that a program makes: devices, contexts, memory, streams, and one kernel.
 *
 * Every call that needs an initialised driver passes the gate (CALL), so that it waits while the process is locked.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda_abi.h"
#include "ledger.h"
#include "memory.h"
#include "node.h"
#include "process.h"

/* Runs a block past the gate; `result` is what the call returns. */
#define CALL(...)                                            \
	do {                                                 \
		CUresult result = process_enter();           \
		if (result != CUDA_SUCCESS)                  \
			return result;                       \
		__VA_ARGS__ process_leave();                 \
		return result;                               \
	} while (0)

static struct fake_context {
	int gpu;
} contexts[MAX_GPUS];

static struct fake_stream {
	int number;
} streams[256];

static struct fake_module {
	int loaded;
} the_module;

static struct fake_function {
	int known;
} spin;

static _Thread_local CUcontext current;
static _Atomic int stream_count;

EXPORT CUresult cuInit(unsigned int flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : process_init();
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
	static struct node node;

	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = node_read(&node) ? node.cuda_version : 13000;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text)
{
	*text = error_name((int)error);
	return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
	*text = error_words((int)error);
	return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_gpu(CUdevice device)
{
	return device >= 0 && (unsigned int)device < process_node()->gpu_count;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
	CALL(*count = (int)process_node()->gpu_count;);
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	CALL(if (is_gpu(ordinal)) *device = ordinal; else result = CUDA_ERROR_INVALID_DEVICE;);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	CALL(if (is_gpu(device)) memcpy(uuid->bytes, process_node()->gpus[device].uuid, 16);
	     else result = CUDA_ERROR_INVALID_DEVICE;);
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
	return cuDeviceGetUuid_v2(uuid, device);
}

EXPORT CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
	CALL(if (is_gpu(device)) snprintf(name, (size_t)bytes, "%s", process_node()->gpus[device].name);
	     else result = CUDA_ERROR_INVALID_DEVICE;);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	CALL(if (is_gpu(device)) *bytes = process_node()->gpus[device].memory_bytes;
	     else result = CUDA_ERROR_INVALID_DEVICE;);
}

static CUresult retain(CUcontext *context, CUdevice device)
{
	CALL(result = is_gpu(device) ? memory_add_context(device) : CUDA_ERROR_INVALID_DEVICE;
	     if (result == CUDA_SUCCESS) {
		     contexts[device].gpu = device;
		     *context = &contexts[device];
	     });
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	return retain(context, device);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	CALL(if (!is_gpu(device)) result = CUDA_ERROR_INVALID_DEVICE;);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	CUresult result = retain(context, device);

	(void)flags;
	if (result == CUDA_SUCCESS)
		current = *context;
	return result;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
	CALL(current = context;);
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
	CALL(*context = current;);
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
	CALL(if (current) *device = current->gpu; else result = CUDA_ERROR_INVALID_CONTEXT;);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
	CALL(result = current ? memory_allocate(current->gpu, bytes, address) : CUDA_ERROR_INVALID_CONTEXT;);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
	(void)flags;
	CALL(result = current ? memory_allocate_managed(bytes, address) : CUDA_ERROR_INVALID_CONTEXT;);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
	CALL(result = memory_free(address););
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
	uint64_t room = 0, total = 0;

	CALL(result = current ? memory_room(current->gpu, &room, &total) : CUDA_ERROR_INVALID_CONTEXT;
	     *free_bytes = room; *total_bytes = total;);
}

/* Pinned memory: shared and without a name, as the driver's is, so that it is "/dev/zero (deleted)" in /proc/PID/maps. Its
 * size is kept in front of it, for the call that frees it. */
#define PINNED_HEAD 4096

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags)
{
	(void)flags;
	CALL(size_t whole = bytes + PINNED_HEAD;
	     char *place = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	     if (place == MAP_FAILED) result = CUDA_ERROR_OUT_OF_MEMORY; else {
		     memcpy(place, &whole, sizeof whole);
		     *address = place + PINNED_HEAD;
	     });
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t bytes)
{
	return cuMemHostAlloc(address, bytes, 0);
}

EXPORT CUresult cuMemFreeHost(void *address)
{
	CALL(size_t whole; memcpy(&whole, (char *)address - PINNED_HEAD, sizeof whole);
	     munmap((char *)address - PINNED_HEAD, whole););
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
	CALL(if (memory_contains(to, bytes)) memcpy((void *)to, from, bytes); else result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
	CALL(if (memory_contains(from, bytes)) memcpy(to, (void *)from, bytes); else result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	CALL(if (memory_contains(from, bytes) && memory_contains(to, bytes)) memmove((void *)to, (void *)from, bytes);
	     else result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
	CALL(if (memory_contains(to, count)) memset((void *)to, value, count); else result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count)
{
	CALL(if (memory_contains(to, 4 * count)) for (size_t i = 0; i < count; i++) ((uint32_t *)to)[i] = value;
	     else result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
	CALL(memset(handle, 0, sizeof *handle); memcpy(handle, &address, sizeof address);
	     if (!memory_contains(address, 1)) result = CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
	(void)address, (void)handle, (void)flags;
	CALL(result = CUDA_ERROR_NOT_SUPPORTED;);
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	(void)flags;
	CALL(*stream = &streams[stream_count++ % 256];);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
	(void)stream;
	CALL();
}

EXPORT CUresult cuCtxSynchronize(void)
{
	CALL(while (process_busy()) sleep_ms(1););
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
	(void)stream;
	return cuCtxSynchronize();
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	CALL(if (image) *module = &the_module; else result = CUDA_ERROR_INVALID_IMAGE;);
}

/* No kernel is run: the one called "spin" takes a number of nanoseconds, and the GPU is busy for as long. */
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	(void)module;
	CALL(if (strcmp(name, "spin") == 0) *function = &spin; else result = CUDA_ERROR_NOT_FOUND;);
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
			       unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
			       CUstream stream, void **parameters, void **extra)
{
	(void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
	(void)shared_bytes, (void)stream, (void)extra;
	CALL(if (function == &spin && parameters) process_add_work(*(uint64_t *)parameters[0]);
	     else result = CUDA_ERROR_INVALID_HANDLE;);
}

/* The newest name of a call: the bare one, or with _v2. */
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
	Dl_info here;
	char newer[128];
	void *library;

	(void)version, (void)flags;
	*function = NULL;
	snprintf(newer, sizeof newer, "%s_v2", symbol);
	if (dladdr((void *)(uintptr_t)cuInit, &here) && (library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD))) {
		*function = dlsym(library, newer);
		if (!*function)
			*function = dlsym(library, symbol);
		dlclose(library);
	}
	if (status)
		*status = *function ? 0 : 1;
	return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

/* For the stand-in of NVML in the same process: the ledger must not open this process's own entry a second time. */
EXPORT const struct holder *fake_cuda_own_holdings(void)
{
	return ledger_own();
}
