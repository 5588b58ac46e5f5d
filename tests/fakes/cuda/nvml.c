/* NVML's calls, as nvidia-ml-py makes them: the node's GPUs from gpus.json, and the memory of processes from the ledger. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "cuda_abi.h"
#include "faults.h"
#include "ledger.h"
#include "node.h"
#include "nvml.h"

#define MAX_HOLDERS 512

typedef struct {
	unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
	unsigned int version;
	unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
	unsigned int pid;
	unsigned long long used_bytes;
	unsigned int gpu_instance, compute_instance;
} nvmlProcessInfo_t;

static struct node node;
static int users; /* calls of nvmlInit without nvmlShutdown */
static pthread_mutex_t holders_lock = PTHREAD_MUTEX_INITIALIZER;
static struct holder holders[MAX_HOLDERS];

EXPORT const char *nvmlErrorString(int number)
{
	switch (number) {
#define AS_CASE(number, name, text) \
	case number:                 \
		return text;
		NVML_ERRORS(AS_CASE)
	default:
		return "Unknown Error";
	}
}

static nvmlReturn_t look(void)
{
	struct fault fault = fault_take("nvml", 0);
	struct node now;

	if (fault.action == FAULT_HANG)
		fault_hang();
	if (fault.action == FAULT_DIE)
		fault_die();
	if (fault.action == FAULT_FAIL)
		return (nvmlReturn_t)fault.error;
	if (!node_read(&now))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	node = now;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	nvmlReturn_t result = look();

	(void)flags;
	users += result == NVML_SUCCESS;
	return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	if (!users)
		return NVML_ERROR_UNINITIALIZED;
	users--;
	return NVML_SUCCESS;
}

static nvmlReturn_t print(char *into, unsigned int bytes, const char *text)
{
	if (!users)
		return NVML_ERROR_UNINITIALIZED;
	return (unsigned int)snprintf(into, bytes, "%s", text) < bytes ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned int bytes)
{
	return print(text, bytes, node.driver_version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	*version = node.cuda_version;
	return users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	return nvmlSystemGetCudaDriverVersion(version);
}

/* The file is read again here, so that a test can change a node's GPUs while a program has NVML open. */
EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	nvmlReturn_t result = users ? look() : NVML_ERROR_UNINITIALIZED;

	*count = node.gpu_count;
	return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	if (!users)
		return NVML_ERROR_UNINITIALIZED;
	if (index >= node.gpu_count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = &node.gpus[index];
	return node.gpus[index].lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *text, nvmlDevice_t *device)
{
	uint8_t uuid[16];
	int index = uuid_parse(text, uuid) ? node_find(&node, uuid) : -1;

	if (!users)
		return NVML_ERROR_UNINITIALIZED;
	if (index < 0)
		return NVML_ERROR_NOT_FOUND;
	*device = &node.gpus[index];
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *into, unsigned int bytes)
{
	char text[48];

	uuid_print(device->uuid, text);
	return print(into, bytes, text);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *into, unsigned int bytes)
{
	return print(into, bytes, device->name);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	*index = (unsigned int)(device - node.gpus);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
	*minor = (unsigned int)device->minor;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	*major = device->capability_major;
	*minor = device->capability_minor;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
	if (device->mig < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*now = *pending = (unsigned int)device->mig;
	return NVML_SUCCESS;
}

static uint64_t bytes_on(const struct holder *holder, const struct gpu *gpu)
{
	for (int i = 0; i < MAX_GPUS; i++)
		if (memcmp(holder->holdings[i].uuid, gpu->uuid, 16) == 0)
			return holder->holdings[i].bytes;
	return 0;
}

/* All holders, including this process if the fake libcuda is loaded. Under holders_lock. */
static int list_holders(void)
{
	int count = ledger_others(&node, holders, MAX_HOLDERS - 1);
	void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	const struct holder *(*own)(void) =
		driver ? (const struct holder *(*)(void))(uintptr_t)dlsym(driver, "fake_cuda_own_holdings") : NULL;

	if (own)
		holders[count++] = *own();
	if (driver)
		dlclose(driver);
	return count;
}

static uint64_t used_on(const struct gpu *gpu)
{
	uint64_t used = 0;

	pthread_mutex_lock(&holders_lock);
	for (int i = list_holders() - 1; i >= 0; i--)
		used += bytes_on(&holders[i], gpu);
	pthread_mutex_unlock(&holders_lock);
	return used;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	memory->total = device->memory_bytes;
	memory->used = used_on(device);
	memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	nvmlMemory_t plain;

	if (memory->version != (sizeof *memory | 2U << 24))
		return NVML_ERROR_VERSION_MISMATCH;
	nvmlDeviceGetMemoryInfo(device, &plain);
	memory->total = plain.total;
	memory->used = plain.used;
	memory->free = plain.free;
	memory->reserved = 0;
	return NVML_SUCCESS;
}

static nvmlReturn_t list_processes(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *processes)
{
	unsigned int room = processes ? *count : 0, found = 0;

	pthread_mutex_lock(&holders_lock);
	for (int i = list_holders() - 1; i >= 0; i--) {
		uint64_t bytes = bytes_on(&holders[i], device);

		if (!bytes || !holders[i].pid)
			continue;
		if (found < room)
			processes[found] = (nvmlProcessInfo_t){(unsigned int)holders[i].pid, bytes, ~0U, ~0U};
		found++;
	}
	pthread_mutex_unlock(&holders_lock);
	*count = found;
	return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
							    nvmlProcessInfo_t *processes)
{
	return list_processes(device, count, processes);
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
							       nvmlProcessInfo_t *processes)
{
	if (device->mps > 0)
		return list_processes(device, count, processes);
	*count = 0;
	return NVML_SUCCESS;
}
