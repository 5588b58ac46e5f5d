/* Time, waiting and text for the control thread, which must not take a lock or memory that a parked thread may hold. */
#define _GNU_SOURCE
#include "shim.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>

int64_t now_ns(void)
{
	struct timespec now = {0, 0};

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void pause_us(long us)
{
	struct timespec time = {us / 1000000, us % 1000000 * 1000};

	KERNEL(SYS_nanosleep, &time, NULL);
}

int self_tid(void)
{
	return (int)KERNEL(SYS_gettid);
}

int self_pid(void)
{
	return (int)KERNEL(SYS_getpid);
}

void wait_word(uint32_t *word, uint32_t value, int64_t ns)
{
	struct timespec time = {ns / 1000000000, ns % 1000000000};

	KERNEL(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, ns == FOREVER ? NULL : &time);
}

void wake_word(uint32_t *word)
{
	KERNEL(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff);
}

/* All but the two that libc reserves (32: cancellation, 33: setuid in all threads): libc would hang if they were blocked. */
uint64_t block_all_signals(void)
{
	uint64_t all = ~((uint64_t)3 << 31);
	uint64_t before = 0;

	KERNEL(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof(all));
	return before;
}

void set_signal_mask(uint64_t mask)
{
	KERNEL(SYS_rt_sigprocmask, SIG_SETMASK, &mask, NULL, sizeof(mask));
}
