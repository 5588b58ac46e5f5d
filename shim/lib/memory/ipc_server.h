/* The desk at which other processes get descriptors of memory that this one has exported. All but desk_ask are called between
 * memory_enter and memory_leave: a thread that is parked must not hold the desk's lock. */
#ifndef SNAPSHIM_MEMORY_DESK_H
#define SNAPSHIM_MEMORY_DESK_H

#include <stdint.h>

/* The descriptor can be had, until it is withdrawn and closed, under the number that is returned. 0: there can be no desk. */
uint64_t desk_offer(int descriptor);
void desk_withdraw(uint64_t number);
/* The desk's own number, by which it is found. It is opened where there is none; 0: it cannot be. */
uint64_t desk_open(void);
/* As it is, for who may not wait: 0 where there is none. */
uint64_t desk_number(void);
/* A descriptor from another process's desk; -1: it is gone, or does not have it. */
int desk_ask(uint64_t desk, uint64_t number);
void desk_forget(void);

#endif
