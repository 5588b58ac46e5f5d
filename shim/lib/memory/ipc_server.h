/* The server from which other processes get descriptors of memory that this process has exported. All but ipc_server_ask
 * are called between memory_enter and memory_leave: a thread that is parked must not hold the server's lock. */
#ifndef SNAPSHIM_MEMORY_IPC_SERVER_H
#define SNAPSHIM_MEMORY_IPC_SERVER_H

#include <stdbool.h>
#include <stdint.h>

/* Offers the descriptor to other processes under the number that is returned, until it is withdrawn, which closes it. 0: no
 * server can be started. */
uint64_t ipc_server_offer(int descriptor);
void ipc_server_withdraw(uint64_t number);
/* Offers another descriptor under a number, and closes the former one; -1: none, until the memory is back. */
void ipc_server_replace(uint64_t number, int descriptor);
/* From now on only processes of this rank are answered, until it is open to others again. False: others have got something that
 * is still offered. While the job is parked, and no thread in the middle of a call that changes device memory. */
bool ipc_server_close_to_others(void);
void ipc_server_open_to_others(void);
bool ipc_server_has(uint64_t number); /* whether it has a descriptor for it */
/* The number by which clients find the server. Starts the server if there is none; 0: it cannot be started. */
uint64_t ipc_server_open(void);
/* The same without starting one: 0 if there is no server. */
uint64_t ipc_server_number(void);
/* Gets a descriptor from another process's server; -1: the server has ended, or does not have it, or is of a rank that is being
 * moved for longer than the patience. */
#define IPC_PATIENCE_S 30
int ipc_server_ask(uint64_t server, uint64_t number, int patience_s);
void ipc_server_forget(void);

#endif
