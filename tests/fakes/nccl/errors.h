/* Why a call failed: a result for the caller and a sentence for ncclGetLastError. */
#ifndef FAKE_NCCL_ERRORS_H
#define FAKE_NCCL_ERRORS_H

#include "nccl_abi.h"

#define WHY_BYTES 512

/* Records the reason and returns `result`, so that a call can `return failed(...)`. */
ncclResult_t failed(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The calling thread's own last reason. */
const char *last_reason(void);

#endif
