/* Asynchronous copies: what was submitted and is not done. */
#ifndef FAKE_CUDA_COPIES_H
#define FAKE_CUDA_COPIES_H

#include "cuda_abi.h"

#define EVERY_STREAM NULL

/* Does what was submitted to a stream; the default stream waits for every other. CUDA_ERROR_ILLEGAL_ADDRESS: some of it could
 * not be done, since its memory was unmapped meanwhile. */
CUresult copies_finish(CUstream stream);
void copies_forget_after_fork(void);

#endif
