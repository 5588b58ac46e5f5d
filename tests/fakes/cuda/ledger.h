/* The device memory of every running process on every GPU of a node. */
#ifndef FAKE_CUDA_LEDGER_H
#define FAKE_CUDA_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "node.h"

struct holding {
	uint8_t uuid[16];
	uint64_t bytes;
};

struct holder {
	int pid; /* in the caller's pid namespace; 0: not visible there */
	struct holding holdings[MAX_GPUS];
};

enum ledger_result { LEDGER_DONE, LEDGER_FULL, LEDGER_BROKEN };

/* Sets this process's memory on the node's GPU i to bytes[i]. FULL: one of them does not fit, and nothing has changed. */
enum ledger_result ledger_hold(const struct node *node, const uint64_t bytes[MAX_GPUS]);
/* Removes this process's entry and closes its descriptor. */
void ledger_drop(void);
/* In a forked child: the parent's entry is not the child's. */
void ledger_forget_after_fork(void);
/* The running holders except for this process. Takes no lock, so a stopped process does not block it. */
int ledger_others(const struct node *node, struct holder *holders, int room);
/* The memory of this process; all zero: none. */
const struct holder *ledger_own(void);

#endif
