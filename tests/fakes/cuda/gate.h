/* The gate before every call: shut while the process is locked. */
#ifndef FAKE_CUDA_GATE_H
#define FAKE_CUDA_GATE_H

#include <stdbool.h>

/* Both wait while the gate is shut; call gate_leave() afterwards. `alone` also waits for threads with an unused share. */
void gate_enter(void);
void gate_enter_alone(void);
void gate_leave(void);
/* For the driver's threads. */
void gate_shut(void);
void gate_open(void);
bool gate_nobody_inside(void);
void gate_forget_after_fork(void);

#endif
