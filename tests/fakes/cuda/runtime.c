/* libcudart.so.13: the runtime's calls for memory, on top of the driver's.
 *
 * The driver is loaded when a call first needs it, and its calls are looked up by cuGetProcAddress, as in the real
 * runtime. So a library preloaded before libcuda does not see these calls. Errors have the driver's numbers, and are
 * kept per thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda_abi.h"

#define RUNTIME_VERSION 13000
#define MAX_DEVICES 16

typedef int cudaError_t;
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;

enum { cudaSuccess, cudaErrorInvalidValue, cudaErrorInsufficientDriver = 35 };
enum cudaMemcpyKind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, COPY_DEFAULT };

/* X(name, arguments): the driver's calls that are used here. */
#define DRIVER_CALLS(X)                                                              \
	X(cuInit, (unsigned int))                                                    \
	X(cuDriverGetVersion, (int *))                                               \
	X(cuGetErrorName, (int, const char **))                                      \
	X(cuGetErrorString, (int, const char **))                                    \
	X(cuDeviceGetCount, (int *))                                                 \
	X(cuDeviceCanAccessPeer, (int *, CUdevice, CUdevice))                        \
	X(cuDeviceGetAttribute, (int *, int, CUdevice))                              \
	X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                         \
	X(cuDevicePrimaryCtxReset, (CUdevice))                                       \
	X(cuCtxSetCurrent, (CUcontext))                                              \
	X(cuCtxGetCurrent, (CUcontext *))                                            \
	X(cuCtxGetDevice, (CUdevice *))                                              \
	X(cuCtxSynchronize, (void))                                                  \
	X(cuCtxEnablePeerAccess, (CUcontext, unsigned int))                          \
	X(cuCtxDisablePeerAccess, (CUcontext))                                       \
	X(cuMemAlloc, (CUdeviceptr *, size_t))                                       \
	X(cuMemFree, (CUdeviceptr))                                                  \
	X(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                        \
	X(cuMemFreeAsync, (CUdeviceptr, CUstream))                                   \
	X(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned int))                  \
	X(cuMemHostAlloc, (void **, size_t, unsigned int))                           \
	X(cuMemFreeHost, (void *))                                                   \
	X(cuMemGetInfo, (size_t *, size_t *))                                        \
	X(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t))                              \
	X(cuMemcpyHtoD, (CUdeviceptr, const void *, size_t))                         \
	X(cuMemcpyDtoH, (void *, CUdeviceptr, size_t))                               \
	X(cuMemcpyDtoD, (CUdeviceptr, CUdeviceptr, size_t))                          \
	X(cuMemsetD8, (CUdeviceptr, unsigned char, size_t))                          \
	X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))           \
	X(cuStreamCreate, (CUstream *, unsigned int))                                \
	X(cuStreamDestroy, (CUstream))                                               \
	X(cuStreamSynchronize, (CUstream))                                           \
	X(cuEventCreate, (CUevent *, unsigned int))                                  \
	X(cuEventRecord, (CUevent, CUstream))                                        \
	X(cuEventQuery, (CUevent))                                                   \
	X(cuEventDestroy, (CUevent))                                                 \
	X(cuStreamWaitEvent, (CUstream, CUevent, unsigned int))                      \
	X(cuIpcGetEventHandle, (CUipcMemHandle *, CUevent))                          \
	X(cuIpcOpenEventHandle, (CUevent *, CUipcMemHandle))                         \
	X(cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr)) \
	X(cuIpcOpenMemHandle_v2, (CUdeviceptr *, CUipcMemHandle, unsigned int)) \
	X(cuIpcCloseMemHandle, (CUdeviceptr))

#define AS_POINTER(name, arguments) CUresult(*name) arguments;
static struct {
	CUresult (*find)(const char *, void **, int, uint64_t, int *);
	DRIVER_CALLS(AS_POINTER)
} driver;
#undef AS_POINTER

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static cudaError_t opening = cudaErrorInsufficientDriver;
static CUcontext contexts[MAX_DEVICES]; /* the primary ones that were retained */
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int chosen; /* device of a thread that has no context yet */
static _Thread_local cudaError_t last_error;

static void open_driver(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	bool whole;

	*(void **)&driver.find = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
	whole = driver.find != NULL;
#define AS_LOOKUP(name, arguments) \
	whole = whole && driver.find(#name, (void **)&driver.name, 12000, 0, NULL) == CUDA_SUCCESS && driver.name;
	DRIVER_CALLS(AS_LOOKUP)
#undef AS_LOOKUP
	if (whole)
		opening = (cudaError_t)driver.cuInit(0);
}

static cudaError_t need_driver(void)
{
	pthread_once(&opened, open_driver);
	return opening;
}

static cudaError_t primary_of(int device, CUcontext *context)
{
	cudaError_t error = cudaSuccess;

	if (device < 0 || device >= MAX_DEVICES)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&contexts_lock);
	if (!contexts[device])
		error = (cudaError_t)driver.cuDevicePrimaryCtxRetain(&contexts[device], device);
	*context = contexts[device];
	pthread_mutex_unlock(&contexts_lock);
	return error;
}

/* Ensures that the thread has a context: the current one, or the primary one of its device. */
static cudaError_t need_context(void)
{
	cudaError_t error = need_driver();
	CUcontext context = NULL;

	if (!error)
		error = (cudaError_t)driver.cuCtxGetCurrent(&context);
	if (error || context)
		return error;
	error = primary_of(chosen, &context);
	return error ? error : (cudaError_t)driver.cuCtxSetCurrent(context);
}

/* Keeps an error for cudaGetLastError. */
static cudaError_t keep(cudaError_t error)
{
	if (error)
		last_error = error;
	return error;
}

/* Runs a call of the driver that needs a context. */
#define WITH_CONTEXT(call)                                        \
	do {                                                      \
		cudaError_t error = need_context();               \
		return keep(error ? error : (cudaError_t)(call)); \
	} while (0)

/* ---------------------------------------------------------------- errors */

/* An error that has broken the context stays. */
static bool sticky(cudaError_t error)
{
	return error == CUDA_ERROR_ILLEGAL_ADDRESS || error == CUDA_ERROR_LAUNCH_FAILED;
}

EXPORT cudaError_t cudaGetLastError(void)
{
	cudaError_t error = last_error;

	if (!sticky(error))
		last_error = cudaSuccess;
	return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
	return last_error;
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
	const char *text = NULL;

	return need_driver() == cudaSuccess && driver.cuGetErrorName(error, &text) == CUDA_SUCCESS ?
		       text :
		       "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error)
{
	const char *text = NULL;

	return need_driver() == cudaSuccess && driver.cuGetErrorString(error, &text) == CUDA_SUCCESS ?
		       text :
		       "unrecognized error code";
}

/* ---------------------------------------------------------------- devices */

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
	if (!version)
		return keep(cudaErrorInvalidValue);
	*version = RUNTIME_VERSION;
	return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
	if (!version)
		return keep(cudaErrorInvalidValue);
	*version = 0;
	return need_driver() == cudaErrorInsufficientDriver ? cudaSuccess : (cudaError_t)driver.cuDriverGetVersion(version);
}

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
	cudaError_t error = need_driver();

	if (error && count)
		*count = 0;
	return keep(error ? error : (cudaError_t)driver.cuDeviceGetCount(count));
}

EXPORT cudaError_t cudaSetDevice(int device)
{
	cudaError_t error = need_driver();
	CUcontext context = NULL;
	int count = 0;

	if (!error)
		error = (cudaError_t)driver.cuDeviceGetCount(&count);
	if (!error && (device < 0 || device >= count))
		error = CUDA_ERROR_INVALID_DEVICE;
	if (!error)
		error = primary_of(device, &context);
	if (!error)
		error = (cudaError_t)driver.cuCtxSetCurrent(context);
	if (!error)
		chosen = device;
	return keep(error);
}

EXPORT cudaError_t cudaGetDevice(int *device)
{
	cudaError_t error = need_driver();
	CUcontext context = NULL;

	if (!error)
		error = (cudaError_t)driver.cuCtxGetCurrent(&context);
	if (!error && context)
		return keep((cudaError_t)driver.cuCtxGetDevice(device));
	*device = chosen;
	return keep(error);
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device)
{
	cudaError_t error = need_driver();

	return keep(error ? error : (cudaError_t)driver.cuDeviceGetAttribute(value, attribute, device));
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
	WITH_CONTEXT(driver.cuCtxSynchronize());
}

EXPORT cudaError_t cudaDeviceReset(void)
{
	cudaError_t error = need_driver();
	int device = 0;

	if (!error)
		error = cudaGetDevice(&device);
	if (!error) {
		pthread_mutex_lock(&contexts_lock);
		contexts[device] = NULL;
		pthread_mutex_unlock(&contexts_lock);
		driver.cuCtxSetCurrent(NULL);
		error = (cudaError_t)driver.cuDevicePrimaryCtxReset(device);
		chosen = device;
	}
	return keep(error);
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
	cudaError_t error = need_driver();

	return keep(error ? error : (cudaError_t)driver.cuDeviceCanAccessPeer(can, device, peer));
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
	cudaError_t error = need_context();
	CUcontext context = NULL;

	if (!error)
		error = primary_of(peer, &context);
	return keep(error ? error : (cudaError_t)driver.cuCtxEnablePeerAccess(context, flags));
}

EXPORT cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
	cudaError_t error = need_context();
	CUcontext context = NULL;

	if (!error)
		error = primary_of(peer, &context);
	return keep(error ? error : (cudaError_t)driver.cuCtxDisablePeerAccess(context));
}

/* ---------------------------------------------------------------- memory */

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes)
{
	if (!address)
		return keep(cudaErrorInvalidValue);
	*address = NULL;
	WITH_CONTEXT(bytes ? driver.cuMemAlloc((CUdeviceptr *)address, bytes) : CUDA_SUCCESS);
}

EXPORT cudaError_t cudaFree(void *address)
{
	WITH_CONTEXT(address ? driver.cuMemFree((CUdeviceptr)address) : CUDA_SUCCESS);
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream)
{
	if (!address)
		return keep(cudaErrorInvalidValue);
	*address = NULL;
	WITH_CONTEXT(bytes ? driver.cuMemAllocAsync((CUdeviceptr *)address, bytes, stream) : CUDA_SUCCESS);
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream)
{
	WITH_CONTEXT(address ? driver.cuMemFreeAsync((CUdeviceptr)address, stream) : CUDA_SUCCESS);
}

EXPORT cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned int flags)
{
	WITH_CONTEXT(driver.cuMemAllocManaged((CUdeviceptr *)address, bytes, flags));
}

EXPORT cudaError_t cudaMallocHost(void **address, size_t bytes)
{
	WITH_CONTEXT(driver.cuMemHostAlloc(address, bytes, 0));
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned int flags)
{
	WITH_CONTEXT(driver.cuMemHostAlloc(address, bytes, flags));
}

EXPORT cudaError_t cudaFreeHost(void *address)
{
	WITH_CONTEXT(address ? driver.cuMemFreeHost(address) : CUDA_SUCCESS);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
	WITH_CONTEXT(driver.cuMemGetInfo(free_bytes, total_bytes));
}

static CUresult copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
	switch (kind) {
	case HOST_TO_HOST:
		memmove(to, from, bytes);
		return CUDA_SUCCESS;
	case HOST_TO_DEVICE:
		return driver.cuMemcpyHtoD((CUdeviceptr)to, from, bytes);
	case DEVICE_TO_HOST:
		return driver.cuMemcpyDtoH(to, (CUdeviceptr)from, bytes);
	case DEVICE_TO_DEVICE:
		return driver.cuMemcpyDtoD((CUdeviceptr)to, (CUdeviceptr)from, bytes);
	case COPY_DEFAULT:
		return driver.cuMemcpy((CUdeviceptr)to, (CUdeviceptr)from, bytes);
	default:
		return 21; /* cudaErrorInvalidMemcpyDirection */
	}
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
	WITH_CONTEXT(copy(to, from, bytes, kind));
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	(void)stream;
	WITH_CONTEXT(copy(to, from, bytes, kind));
}

EXPORT cudaError_t cudaMemset(void *address, int value, size_t bytes)
{
	WITH_CONTEXT(driver.cuMemsetD8((CUdeviceptr)address, (unsigned char)value, bytes));
}

EXPORT cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream)
{
	WITH_CONTEXT(driver.cuMemsetD8Async((CUdeviceptr)address, (unsigned char)value, bytes, stream));
}

EXPORT cudaError_t cudaIpcGetMemHandle(CUipcMemHandle *handle, void *address)
{
	WITH_CONTEXT(driver.cuIpcGetMemHandle(handle, (CUdeviceptr)address));
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **address, CUipcMemHandle handle, unsigned int flags)
{
	WITH_CONTEXT(driver.cuIpcOpenMemHandle_v2((CUdeviceptr *)address, handle, flags));
}

EXPORT cudaError_t cudaIpcCloseMemHandle(void *address)
{
	WITH_CONTEXT(driver.cuIpcCloseMemHandle((CUdeviceptr)address));
}

/* ---------------------------------------------------------------- events */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
	WITH_CONTEXT(driver.cuEventCreate(event, flags));
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
	WITH_CONTEXT(driver.cuEventRecord(event, stream));
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event)
{
	WITH_CONTEXT(driver.cuEventQuery(event));
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event)
{
	WITH_CONTEXT(driver.cuEventDestroy(event));
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
	WITH_CONTEXT(driver.cuStreamWaitEvent(stream, event, flags));
}

EXPORT cudaError_t cudaIpcGetEventHandle(CUipcMemHandle *handle, cudaEvent_t event)
{
	WITH_CONTEXT(driver.cuIpcGetEventHandle(handle, event));
}

EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, CUipcMemHandle handle)
{
	WITH_CONTEXT(driver.cuIpcOpenEventHandle(event, handle));
}

/* ---------------------------------------------------------------- streams, and the lookup of driver calls */

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
	WITH_CONTEXT(driver.cuStreamCreate(stream, 0));
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
	WITH_CONTEXT(driver.cuStreamCreate(stream, flags));
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	WITH_CONTEXT(driver.cuStreamDestroy(stream));
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
	WITH_CONTEXT(driver.cuStreamSynchronize(stream));
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
						    unsigned long long flags, int *status)
{
	cudaError_t error = need_driver();

	if (!error && (!symbol || !function))
		error = cudaErrorInvalidValue;
	return keep(error ? error : (cudaError_t)driver.find(symbol, function, (int)version, flags, status));
}

EXPORT cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status)
{
	return cudaGetDriverEntryPointByVersion(symbol, function, RUNTIME_VERSION, flags, status);
}
