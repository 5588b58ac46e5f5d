/* Asynchronous copies that were submitted and are not done. */
#ifndef FAKE_CUDA_COPIES_H
#define FAKE_CUDA_COPIES_H

#include <stdbool.h>

#include "cuda_abi.h"

#define EVERY_STREAM NULL

/* Executes the copies of a stream; the default stream includes all others. CUDA_ERROR_ILLEGAL_ADDRESS: the memory of
 * some copy was unmapped meanwhile. */
CUresult copies_finish(CUstream stream);
void copies_forget_after_fork(void);

/* streams.c */
bool streams_have_interprocess_events(void);

#endif
