/* How much device memory every living process holds on every GPU of a node. */
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
	int pid; /* as the caller's pid namespace numbers it; 0: not visible there */
	struct holding holdings[MAX_GPUS];
};

enum ledger_result { LEDGER_DONE, LEDGER_FULL, LEDGER_BROKEN };

/* This process holds bytes[i] on the node's GPU i from now on. FULL: one of them does not fit, nothing has changed. */
enum ledger_result ledger_hold(const struct node *node, const uint64_t bytes[MAX_GPUS]);
/* This process holds nothing, and no descriptor is left. */
void ledger_drop(void);
/* In a forked child: the parent's entry is not the child's. */
void ledger_forget_after_fork(void);
/* The living holders but for this process. Takes no lock: a stopped process keeps nobody waiting. */
int ledger_others(const struct node *node, struct holder *holders, int room);
/* What this process holds; all zero: nothing. */
const struct holder *ledger_own(void);

#endif
