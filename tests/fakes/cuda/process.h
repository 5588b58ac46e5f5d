/* The driver inside a process: its state, the gate before every call, and its threads. */
#ifndef FAKE_CUDA_PROCESS_H
#define FAKE_CUDA_PROCESS_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "node.h"

CUresult process_init(void);
/* Begins every call of the program: waits while the process is locked. After CUDA_SUCCESS, call process_leave(). */
CUresult process_enter(void);
/* The same for a call that needs the driver's lock exclusively: also waits for threads that have an unused share. */
CUresult process_enter_alone(void);
void process_leave(void);
/* The GPUs that the process sees; those of another node after a restore there. */
struct node *process_node(void);
/* Makes the GPU busy for so long, from now or from the end of its previous work. */
void process_add_work(uint64_t ns);
bool process_busy(void);
void sleep_ms(unsigned int ms);

#endif
