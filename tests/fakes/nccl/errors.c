/* Error messages. Invariant: the text that ncclGetLastError returns belongs to the calling thread and does not change
 * until that thread calls it again, so no thread reads a message while another writes it.
 */
#include "errors.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "communicator.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char process_reason[WHY_BYTES];
static __thread char thread_reason[WHY_BYTES];
static __thread char answer[WHY_BYTES];

ncclResult_t failed(ncclResult_t result, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(thread_reason, sizeof(thread_reason), format, arguments);
	va_end(arguments);
	pthread_mutex_lock(&lock);
	memcpy(process_reason, thread_reason, sizeof(process_reason));
	pthread_mutex_unlock(&lock);
	return result;
}

const char *last_reason(void)
{
	return thread_reason;
}

const char *ncclGetLastError(ncclComm_t handle)
{
	if (!comm_copy_reason(handle, answer)) {
		pthread_mutex_lock(&lock);
		memcpy(answer, process_reason, sizeof(answer));
		pthread_mutex_unlock(&lock);
	}
	return answer;
}

const char *ncclGetErrorString(ncclResult_t result)
{
	switch (result) {
	case ncclSuccess:
		return "success";
	case ncclUnhandledCudaError:
		return "a CUDA call failed";
	case ncclSystemError:
		return "a system call failed";
	case ncclInternalError:
		return "internal error, or the communicator was aborted";
	case ncclInvalidArgument:
		return "an argument is not valid";
	case ncclInvalidUsage:
		return "the call is not allowed here";
	case ncclRemoteError:
		return "another rank failed or closed its connection";
	case ncclInProgress:
		return "still in progress";
	default:
		return "no such result";
	}
}
