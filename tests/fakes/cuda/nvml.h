/* Types and errors of NVML, as nvidia-ml-py knows them. */
#ifndef FAKE_CUDA_NVML_H
#define FAKE_CUDA_NVML_H

/* X(number, name, text) */
#define NVML_ERRORS(X)                                         \
	X(0, NVML_SUCCESS, "Success")                          \
	X(1, NVML_ERROR_UNINITIALIZED, "Uninitialized")        \
	X(2, NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument")  \
	X(3, NVML_ERROR_NOT_SUPPORTED, "Not Supported")        \
	X(6, NVML_ERROR_NOT_FOUND, "Not Found")                \
	X(7, NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size") \
	X(9, NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded") \
	X(15, NVML_ERROR_GPU_IS_LOST, "GPU is lost")           \
	X(25, NVML_ERROR_VERSION_MISMATCH, "Argument Version Mismatch") \
	X(999, NVML_ERROR_UNKNOWN, "Unknown Error")

#define AS_ENUM(number, name, text) name = number,
typedef enum { NVML_ERRORS(AS_ENUM) } nvmlReturn_t;
#undef AS_ENUM

typedef struct gpu *nvmlDevice_t;

#endif
