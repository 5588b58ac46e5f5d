/* The control thread's side of parking: parks every thread of the job in the reserved signal's handler, and releases them.
 *
 * Why: the CUDA driver checkpoints and restores only a process that runs, while the job must not run. Invariant: `parked`
 * is 1 only when two successive lists of the process's threads contained only parked threads, the driver's and ours. A
 * parked thread has every signal blocked, so no handler of the job runs either. The state is plain memory and one futex,
 * so it is valid before a dump and after a restore, where thread ids are the same in the new pid namespace.
 *
 * Everything here runs while other threads may hold any lock, so it neither allocates nor makes a libc call that locks.
 */
#define _GNU_SOURCE
#include "parking.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>

#define FIRST_ROUND_NS 200000000
#define LONGEST_ROUND_NS 10000000000
#define PATIENCE_NS 50000000

/* Whether a thread need not be parked: it is ours, the driver's, or has exited (an exited main thread stays listed). */
static bool exempt(int tid, struct task *task)
{
	if (tid == snapshim_mailbox.thread || tid == snapshim_mailbox.probe)
		return true;
	task_look(tid, task);
	return task->state == 0 || task->state == 'Z' || task->state == 'X' || is_exempt_thread(tid, task);
}

/* Signals all threads that are not parked. Returns how many of the job's are not parked, or a negative errno. */
static int scan(int *job_threads)
{
	struct listing tasks;
	struct task task;
	int missing = 0, listed = 0, threads, tid;
	bool seen_self = false, coming = exempt_thread_starting();
	int status = listing_open(&tasks, TASKS);

	*job_threads = 0;
	if (status)
		return -status;
	threads = listing_threads(&tasks);
	while (threads <= PARKED_THREADS_MAX && (tid = listing_next(&tasks)) > 0) {
		listed++;
		seen_self |= tid == snapshim_mailbox.thread;
		if (parking_find(parking.parked, tid)) {
			++*job_threads;
			continue;
		}
		if (exempt(tid, &task))
			continue;
		++*job_threads;
		missing++;
		if (!coming && !parking_find(parking.signalled, tid)) {
			int *slot = parking_claim(parking.signalled, tid); /* before it can be answered */

			if (signal_thread(tid) != 0 && slot)
				STORE(slot, 0);
		}
	}
	/* A list that was read while threads started and ended may lack a thread that existed all the time. */
	if (listed != threads || listing_threads(&tasks) != threads)
		missing++;
	listing_close(&tasks);
	if (threads > PARKED_THREADS_MAX)
		return -E2BIG;
	return seen_self ? missing : -ESRCH;
}

/* Parks threads until all are parked; does not park threads that sleep in the driver before `outside_until_ns`. Returns 0,
 * ETIMEDOUT or another errno. */
static int gather(int64_t until_ns, int64_t patience_ns, int64_t outside_until_ns)
{
	int64_t patient_until = now_ns() + patience_ns;
	int quiet_scans = 0;
	long pause = 50;

	memset(parking.signalled, 0, sizeof(parking.signalled));
	STORE(&parking.in_driver, 0);
	STORE(&parking.patient, 1);
	STORE(&parking.closed, 1);
	for (;;) {
		int job_threads, missing;

		/* A thread that seems to sleep in the driver for this long may not be inside it. */
		STORE(&parking.outside_driver, now_ns() < outside_until_ns);
		missing = scan(&job_threads);
		if (missing < 0)
			return -missing;
		quiet_scans = missing ? 0 : quiet_scans + 1;
		if (quiet_scans == 2) {
			snapshim_mailbox.parked_threads = (uint32_t)job_threads;
			return 0;
		}
		if (missing) {
			if (now_ns() >= until_ns)
				return ETIMEDOUT;
			if (now_ns() >= patient_until) {
				STORE(&parking.patient, 0);
				pause = pause < 1000 ? pause * 2 : 2000;
			}
			pause_us(pause);
		}
	}
}

/* Releases all threads. After ETIMEDOUT some have not left the handler yet, but none is kept there. */
static int resume(int64_t until_ns)
{
	snapshim_mailbox.parked_threads = 0;
	STORE(&snapshim_mailbox.parked, 0);
	__atomic_store_n(&parking.closed, 0, __ATOMIC_SEQ_CST);
	wake_word(&parking.closed);
	memory_calls_resume();
	while (__atomic_load_n(&parking.waiting, __ATOMIC_SEQ_CST)) {
		if (now_ns() >= until_ns)
			return ETIMEDOUT;
		pause_us(50);
		wake_word(&parking.closed);
	}
	return 0;
}

/* Names the threads that are not parked, before the others are released. */
static void describe_missing(void)
{
	struct listing tasks;
	struct task task;
	const char *before = "these threads could not be parked: ";
	int tid;

	if (listing_open(&tasks, TASKS))
		return;
	while ((tid = listing_next(&tasks)) > 0) {
		char state[2] = {0, 0};

		if (parking_find(parking.parked, tid) || exempt(tid, &task))
			continue;
		state[0] = task.state;
		add_text(before);
		add_number(tid);
		add_text(" (");
		add_text(task.name);
		add_text(", state ");
		add_text(state);
		add_text(task_blocks_signal(tid) ? ", blocks signal 61)" : ")");
		before = ", ";
	}
	listing_close(&tasks);
	if (*before != ',')
		add_text("threads start and end so fast that the process never stands still");
}

static void describe_error(int status)
{
	if (status == E2BIG) {
		add_text("the process has more threads than can be parked (");
		add_number(PARKED_THREADS_MAX);
		add_text(")");
	} else if (status == ESRCH) {
		add_text("/proc in this process's mount namespace belongs to another pid namespace: its threads are not "
			 "found there");
	} else {
		add_text("/proc/self/task cannot be read in this process (errno ");
		add_number(status);
		add_text("): is /proc mounted there?");
	}
}

static void back_off(int round)
{
	pause_us(500 + now_ns() / 1000 % (round < 8 ? 1000 << round : 256000) / 8);
}

static int fail(int status, const char *lock)
{
	if (status && status != ETIMEDOUT)
		describe_error(status);
	else if (!lock) {
		describe_missing();
		if (LOAD(&parking.in_driver)) {
			add_text("; some of them do not leave the CUDA driver");
			status = EBUSY;
		}
	}
	if (lock) {
		add_text("whenever the threads are parked, one of them holds ");
		add_text(lock);
		add_text(", which the driver needs");
	}
	resume(FOREVER);
	return status ? status : ETIMEDOUT;
}

int release(int64_t timeout_ns)
{
	int status = resume(now_ns() + timeout_ns);

	if (status) {
		add_number((long)LOAD(&parking.waiting));
		add_text(" threads were released and have not run yet: the node is overloaded, or the CPU limit of the "
			 "process gives them no time");
	}
	return status;
}

int park(int64_t timeout_ns, bool outside_the_driver)
{
	int64_t deadline = now_ns() + timeout_ns;
	int64_t round_ns = FIRST_ROUND_NS;
	int status;

	if (LOAD(&snapshim_mailbox.parked) && LOAD(&parking.closed))
		return 0;
	/* Threads that an earlier release did not wait for may still be leaving, and still have an entry in `parked`. */
	status = release(timeout_ns);
	if (status)
		return status;
	signals_install();
	places_find();
	status = probe_start();
	if (status) {
		add_text("no thread can be started in this process: a limit of processes (ulimit -u, pids.max) is reached");
		return status;
	}
	for (int round = 0;; round++) {
		int64_t until = now_ns() + round_ns;
		const char *lock = probe_settle(deadline);

		if (!lock) {
			/* A job that mostly allocates would otherwise be inside the driver at every scan. */
			if (outside_the_driver)
				memory_calls_delay(round_ns);
			status = gather(until < deadline ? until : deadline, PATIENCE_NS * (round < 8 ? round + 1 : 8),
					outside_the_driver ? deadline - timeout_ns / 2 : 0);
			if (status == 0)
				lock = probe_run(deadline);
			if (status == 0 && !lock) {
				memory_calls_resume(); /* their threads are parked */
				STORE(&snapshim_mailbox.parked, 1);
				return 0;
			}
		}
		if ((status && status != ETIMEDOUT) || now_ns() >= deadline)
			return fail(status, lock);
		/* Also when not all could be parked: one that is parked in pthread_create keeps its new thread from
		 * starting. */
		resume(FOREVER);
		back_off(round);
		round_ns = round_ns < LONGEST_ROUND_NS ? round_ns * 2 : LONGEST_ROUND_NS;
	}
}

void park_forget(void)
{
	if (LOAD(&parking.closed) || LOAD(&parking.waiting)) {
		memset(parking.parked, 0, sizeof(parking.parked));
		STORE(&parking.waiting, 0);
		STORE(&parking.closed, 0);
	}
	memory_calls_resume();
	snapshim_mailbox.parked_threads = 0;
	snapshim_mailbox.parked = 0;
}
