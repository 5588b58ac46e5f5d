/* NVML's calls for the health of a GPU: what gpus.json says about it. */
#include <stdio.h>
#include <string.h>

#include "cuda_abi.h"
#include "node.h"
#include "nvml.h"

#define SLOWDOWN_C 90
#define PCIE_WIDTH 16
#define PCIE_GENERATION 5
#define UNCORRECTED 1 /* nvmlMemoryErrorType_t */

typedef struct {
	char legacy_bus_id[16];
	unsigned int domain, bus, device, device_id, subsystem_id;
	char bus_id[32];
} nvmlPciInfo_t;

static nvmlReturn_t answer(const struct gpu *gpu)
{
	return gpu->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t gpu, int type, int since, unsigned long long *count)
{
	(void)since;
	*count = type == UNCORRECTED ? gpu->ecc_uncorrected : gpu->ecc_corrected;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t gpu, unsigned int *corrected, unsigned int *uncorrected,
					      unsigned int *pending, unsigned int *failed)
{
	*corrected = gpu->remapped_corrected;
	*uncorrected = gpu->remapped_uncorrected;
	*pending = gpu->remap_pending;
	*failed = gpu->remap_failed;
	return answer(gpu);
}

/* GPUs that replace rows retire no pages. */
EXPORT nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t gpu, int *pending)
{
	(void)gpu;
	*pending = 0;
	return NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t gpu, int sensor, unsigned int *celsius)
{
	(void)sensor;
	*celsius = gpu->temperature_c;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t gpu, int kind, unsigned int *celsius)
{
	(void)kind;
	*celsius = SLOWDOWN_C;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t gpu, unsigned long long *reasons)
{
	*reasons = gpu->slow_reasons;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t gpu, unsigned int *count)
{
	*count = gpu->pcie_replays;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t gpu, unsigned int *lanes)
{
	*lanes = gpu->pcie_width;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t gpu, unsigned int *lanes)
{
	*lanes = PCIE_WIDTH;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t gpu, unsigned int *generation)
{
	*generation = PCIE_GENERATION;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t gpu, unsigned int *generation)
{
	return nvmlDeviceGetCurrPcieLinkGeneration(gpu, generation);
}

EXPORT nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t gpu, int *state)
{
	*state = 0;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t gpu, unsigned int link, int *active)
{
	if (link >= gpu->nvlinks)
		return gpu->nvlinks ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
	*active = !(gpu->nvlinks_down >> link & 1);
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t gpu, unsigned int link, int kind, unsigned long long *count)
{
	if (link >= gpu->nvlinks)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = link == 0 && kind == 0 ? gpu->nvlink_errors : 0;
	return answer(gpu);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t gpu, nvmlPciInfo_t *info)
{
	memset(info, 0, sizeof *info);
	info->bus = 0x10U + (unsigned int)gpu->minor;
	snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "0000:%02X:00.0", info->bus & 0xffU);
	snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus & 0xffU);
	return answer(gpu);
}
