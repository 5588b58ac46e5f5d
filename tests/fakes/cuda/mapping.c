/* The driver's virtual-memory calls: checks their arguments, and calls virtual.c and physical.c. */
#include "call.h"
#include "faults.h"
#include "physical.h"
#include "table.h"
#include "virtual.h"

static bool is_gpu_location(const CUmemLocation *location)
{
	return location->type == LOCATION_DEVICE && location->id >= 0 &&
	       (unsigned int)location->id < process_node()->gpu_count;
}

static CUresult check(const CUmemAllocationProp *prop)
{
	if (!prop || prop->type != ALLOCATION_PINNED || prop->win32HandleMetaData)
		return CUDA_ERROR_INVALID_VALUE;
	if (prop->location.type != LOCATION_DEVICE || prop->requestedHandleTypes & ~HANDLE_FILE)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (!is_gpu_location(&prop->location))
		return CUDA_ERROR_INVALID_DEVICE;
	return process_node()->gpus[prop->location.id].virtual_memory ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option)
{
	CALL(result = bytes && (option == 0 || option == 1) ? check(prop) : CUDA_ERROR_INVALID_VALUE;
	     if (result == CUDA_SUCCESS) *bytes = GRAIN_BYTES;);
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
				    unsigned long long flags)
{
	CALL(result = flags ? CUDA_ERROR_INVALID_VALUE : virtual_reserve(address, bytes, alignment, wanted););
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
	CALL(result = virtual_unreserve(address, bytes););
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
			    unsigned long long flags)
{
	CALL(result = (CUresult)fault_in_call("create");
	     if (result == CUDA_SUCCESS) result = flags ? CUDA_ERROR_INVALID_VALUE : check(prop);
	     if (result == CUDA_SUCCESS) result = physical_create(handle, bytes, prop););
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	CALL(result = physical_release(handle););
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	CALL(result = handle ? virtual_retain(handle, (CUdeviceptr)address) : CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	CALL(result = prop ? physical_properties(prop, handle) : CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
			 unsigned long long flags)
{
	CALL(result = (CUresult)fault_in_call("map");
	     if (result == CUDA_SUCCESS) result =
		     flags ? CUDA_ERROR_INVALID_VALUE : virtual_map(address, bytes, offset, handle););
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
	CALL(result = (CUresult)fault_in_call("unmap"); if (result == CUDA_SUCCESS) result = virtual_unmap(address, bytes););
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *wanted, size_t count)
{
	CALL(result = (CUresult)fault_in_call("access"); if (!wanted || !count) result = CUDA_ERROR_INVALID_VALUE;
	     for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
		     if (!is_gpu_location(&wanted[i].location))
			     result = CUDA_ERROR_INVALID_DEVICE;
		     else if (wanted[i].flags != ACCESS_NONE && wanted[i].flags != ACCESS_READ &&
			      wanted[i].flags != ACCESS_READ_WRITE)
			     result = CUDA_ERROR_INVALID_VALUE;
	     } for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) result =
		     virtual_set_access(address, bytes, wanted[i].location.id, wanted[i].flags););
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
	CALL(result = flags && location && is_gpu_location(location) ? virtual_get_access(address, location->id, flags) :
								       CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemExportToShareableHandle(void *into, CUmemGenericAllocationHandle handle, int type,
					     unsigned long long flags)
{
	CALL(result = (CUresult)fault_in_call("export");
	     if (result == CUDA_SUCCESS) result =
		     into && !flags && type == HANDLE_FILE ? physical_export(into, handle) : CUDA_ERROR_INVALID_VALUE;);
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from, int type)
{
	CALL(result = (CUresult)fault_in_call("import");
	     if (result == CUDA_SUCCESS) result = handle && type == HANDLE_FILE ?
							  physical_import(handle, (int)(intptr_t)from) :
							  CUDA_ERROR_INVALID_VALUE;);
}
