/* Counts the threads inside calls that change the device memory which this library backs, and delays new calls.
 *
 * PARK needs both. A thread must not be parked in the middle of such a call, where it may hold the lock of the table of
 * blocks. And a job that mostly allocates would be inside such a call whenever it is checked. Invariant: while
 * memory_calls_open() is 0 that lock is free, and the table matches the driver's state. Without lib/memory there are no
 * such calls.
 */
#define _GNU_SOURCE
#include "shim.h"

static uint32_t open_calls, delayed;
static int64_t delayed_until_ns;
static _Thread_local uint32_t depth __attribute__((tls_model("initial-exec"))); /* this thread's share of `open_calls` */

/* Counted before `delayed` is read: either the control thread sees the count, or this thread sees that it must wait. */
void memory_enter(void)
{
	for (;;) {
		int64_t left;

		depth++;
		__atomic_add_fetch(&open_calls, 1, __ATOMIC_SEQ_CST);
		if (!__atomic_load_n(&delayed, __ATOMIC_SEQ_CST))
			return;
		left = LOAD(&delayed_until_ns) - now_ns();
		if (left <= 0) {
			memory_calls_resume();
			return;
		}
		memory_leave();
		wait_word(&delayed, 1, left);
	}
}

void memory_leave(void)
{
	__atomic_sub_fetch(&open_calls, 1, __ATOMIC_SEQ_CST);
	depth--;
}

void memory_calls_delay(int64_t ns)
{
	STORE(&delayed_until_ns, now_ns() + ns);
	__atomic_store_n(&delayed, 1, __ATOMIC_SEQ_CST);
}

void memory_calls_resume(void)
{
	if (__atomic_exchange_n(&delayed, 0, __ATOMIC_SEQ_CST))
		wake_word(&delayed);
}

bool memory_call_open(void)
{
	return depth != 0;
}

uint32_t memory_calls_open(void)
{
	return __atomic_load_n(&open_calls, __ATOMIC_SEQ_CST);
}

void memory_calls_forget(void)
{
	open_calls = 0;
	delayed = 0;
}
