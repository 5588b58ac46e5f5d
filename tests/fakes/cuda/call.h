/* The prologue of every exported call of the driver.
 *
 * A call that needs an initialised driver passes the gate (CALL), so it waits while the process is locked. A call that
 * needs the driver's lock exclusively (CALL_ALONE) also waits for other threads: see gate.c.
 */
#ifndef FAKE_CUDA_CALL_H
#define FAKE_CUDA_CALL_H

#include "cuda_abi.h"
#include "process.h"

/* Runs a block behind the gate; `result` is the return value of the call. */
#define CALL(...) PASS(process_enter, __VA_ARGS__)
#define CALL_ALONE(...) PASS(process_enter_alone, __VA_ARGS__)
#define PASS(enter, ...)                                     \
	do {                                                 \
		CUresult result = enter();                   \
		if (result != CUDA_SUCCESS)                  \
			return result;                       \
		__VA_ARGS__ process_leave();                 \
		return result;                               \
	} while (0)

int current_gpu(void); /* of the thread's context; -1: it has none */
CUcontext context_of(int gpu);

#endif
