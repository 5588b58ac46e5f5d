/* The driver's calls for devices and contexts, one kernel, and the lookup of other calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "call.h"
#include "cuda_abi.h"
#include "ledger.h"
#include "memory.h"
#include "node.h"
#include "process.h"

static struct fake_context {
	int gpu;
	_Atomic int references;
	bool peers[MAX_GPUS]; /* whose memory it may use */
} contexts[MAX_GPUS];

static struct fake_module {
	int loaded;
} the_module;

static struct fake_function {
	int known;
} spin;

#define MAX_DEPTH 16
static _Thread_local CUcontext current, below[MAX_DEPTH];
static _Thread_local int depth;

int current_gpu(void)
{
	return current ? current->gpu : -1;
}

CUcontext context_of(int gpu)
{
	return gpu < 0 ? NULL : &contexts[gpu];
}

EXPORT CUresult cuInit(unsigned int flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : process_init();
}

static int driver_version(void)
{
	struct node node;

	return node_read(&node) ? node.cuda_version : 13000;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = driver_version();
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text)
{
	*text = error_name((int)error);
	return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
	*text = error_text((int)error);
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

EXPORT CUresult cuDeviceGetPCIBusId(char *bus_id, int bytes, CUdevice device)
{
	CALL(if (is_gpu(device)) snprintf(bus_id, (size_t)bytes, "0000:%02x:00.0",
					  (0x10U + (unsigned int)process_node()->gpus[device].minor) & 0xffU);
	     else result = CUDA_ERROR_INVALID_DEVICE;);
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

static int attribute(const struct gpu *gpu, int index, int number, CUresult *result)
{
	switch (number) {
	case DEVICE_MAX_THREADS_PER_BLOCK:
		return 1024;
	case DEVICE_WARP_SIZE:
		return 32;
	case DEVICE_MULTIPROCESSOR_COUNT:
		return 132;
	case DEVICE_PCI_BUS_ID:
		return index + 1;
	case DEVICE_INTEGRATED:
	case DEVICE_PCI_DEVICE_ID:
	case DEVICE_PCI_DOMAIN_ID:
	case DEVICE_MEMORY_POOLS_SUPPORTED:
	case DEVICE_DMA_BUF_SUPPORTED:
	case DEVICE_HANDLE_FABRIC_SUPPORTED:
		return 0;
	case DEVICE_UNIFIED_ADDRESSING:
	case DEVICE_MANAGED_MEMORY:
	case DEVICE_RDMA_SUPPORTED:
		return 1;
	case DEVICE_COMPUTE_CAPABILITY_MAJOR:
		return gpu->capability_major;
	case DEVICE_COMPUTE_CAPABILITY_MINOR:
		return gpu->capability_minor;
	case DEVICE_VIRTUAL_MEMORY_SUPPORTED:
	case DEVICE_HANDLE_FILE_SUPPORTED:
	case DEVICE_RDMA_WITH_VIRTUAL_MEMORY_SUPPORTED:
		return gpu->virtual_memory;
	default:
		*result = CUDA_ERROR_INVALID_VALUE;
		return 0;
	}
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int number, CUdevice device)
{
	CALL(if (!is_gpu(device)) result = CUDA_ERROR_INVALID_DEVICE; else if (!value) result = CUDA_ERROR_INVALID_VALUE;
	     else *value = attribute(&process_node()->gpus[device], device, number, &result););
}

static CUresult retain(CUcontext *context, CUdevice device)
{
	CALL(result = is_gpu(device) ? memory_add_context(device) : CUDA_ERROR_INVALID_DEVICE; if (result == CUDA_SUCCESS) {
		contexts[device].gpu = device;
		contexts[device].references++;
		*context = &contexts[device];
	});
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	return retain(context, device);
}

/* Also frees its memory, except for mapped memory. */
static CUresult end_context(CUdevice device)
{
	memset(&contexts[device], 0, sizeof contexts[device]);
	return memory_drop_context(device);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	CALL(if (!is_gpu(device)) result = CUDA_ERROR_INVALID_DEVICE;
	     else if (!contexts[device].references) result = CUDA_ERROR_INVALID_CONTEXT;
	     else if (--contexts[device].references == 0) result = end_context(device););
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	CALL(if (is_gpu(device)) {
		*flags = 0;
		*active = contexts[device].references > 0;
	} else result = CUDA_ERROR_INVALID_DEVICE;);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
	CALL(result = is_gpu(device) ? end_context(device) : CUDA_ERROR_INVALID_DEVICE;);
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

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	CALL(if (!context) result = CUDA_ERROR_INVALID_CONTEXT;
	     else if (depth == MAX_DEPTH) result = CUDA_ERROR_OUT_OF_MEMORY; else {
		     below[depth++] = current;
		     current = context;
	     });
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	CALL(if (!current) result = CUDA_ERROR_INVALID_CONTEXT; else {
		if (context)
			*context = current;
		current = depth ? below[--depth] : NULL;
	});
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
	CALL(if (is_gpu(device) && is_gpu(peer)) *can = device != peer && !process_node()->no_peers;
	     else result = CUDA_ERROR_INVALID_DEVICE;);
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	CALL(if (!current || !peer || flags) result = CUDA_ERROR_INVALID_VALUE;
	     else if (peer == current) result = CUDA_ERROR_INVALID_DEVICE;
	     else if (current->peers[peer->gpu]) result = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
	     else current->peers[peer->gpu] = true;);
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
	CALL(if (!current || !peer) result = CUDA_ERROR_INVALID_VALUE;
	     else if (!current->peers[peer->gpu]) result = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	     else current->peers[peer->gpu] = false;);
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	CALL(if (image) *module = &the_module; else result = CUDA_ERROR_INVALID_IMAGE;);
}

/* Runs no kernel. The one called "spin" takes a number of nanoseconds, for which the GPU is busy. */
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

/* The newest name of a call: the bare one, or with _v2. NULL, not an error, for a call that does not exist. */
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
	Dl_info here;
	char newer[128];
	void *library;

	(void)flags;
	if (!symbol || !function || version > driver_version())
		return CUDA_ERROR_INVALID_VALUE;
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
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
	CUresult result = cuGetProcAddress_v2(symbol, function, version, flags, NULL);

	return result == CUDA_SUCCESS && !*function ? CUDA_ERROR_NOT_FOUND : result;
}

/* For the fake NVML in the same process: the ledger must not open this process's own entry a second time. */
EXPORT const struct holder *fake_cuda_own_holdings(void)
{
	return ledger_own();
}
