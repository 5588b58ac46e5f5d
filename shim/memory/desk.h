/* The desk at which other processes get descriptors of memory that this one has exported. */
#ifndef SNAPSHIM_MEMORY_DESK_H
#define SNAPSHIM_MEMORY_DESK_H

#include <stdint.h>

/* The desk's number, which is part of the name it is found by; 0: there is none, and none can be opened. */
uint64_t desk_open(void);
uint64_t desk_number(void);
/* The descriptor can be had under the number that is returned, until it is withdrawn and closed; 0: no memory for it. */
uint64_t desk_offer(int descriptor);
void desk_withdraw(uint64_t number);
/* A descriptor from another process's desk; -1: it is gone, or does not have it. */
int desk_ask(uint64_t desk, uint64_t number);
void desk_forget(void);

#endif
