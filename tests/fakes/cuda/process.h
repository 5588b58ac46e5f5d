/* The driver inside a process: its state, the gate before every call, and its threads. */
#ifndef FAKE_CUDA_PROCESS_H
#define FAKE_CUDA_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "node.h"

CUresult process_init(void);
/* Every call of the program passes here: waits while the process is locked. After CUDA_SUCCESS, process_leave(). */
CUresult process_enter(void);
/* The same for a call that wants the driver's lock alone: waits for shares that others were handed, too. */
CUresult process_enter_alone(void);
void process_leave(void);
/* The GPUs the process sees; another node's after a restore there. */
struct node *process_node(void);
/* The GPU is busy for so long from now, or since its last work ends. */
void process_add_work(uint64_t ns);
bool process_busy(void);
void sleep_ms(unsigned int ms);

#endif
