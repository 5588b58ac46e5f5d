/* Makes a twin: a process with a copy of this one's memory, which the kernel makes page by page when one of the two writes.
 * The daemon reads a snapshot from it while the job runs on (snapshotd/moves/source/twins.py).
 *
 * Invariants: the job notices nothing. The twin is no child of the job: a process in between, which ends at once, makes it, so
 * that init adopts it. That one shares this process's memory and waits for no lock, as a child of vfork; it sends no
 * signal when it ends, and the job's wait() does not return it. Neither of them has a descriptor: the peers of sockets and
 * pipes see no further holder. The twin has every signal blocked, makes system calls only, and ends by itself after a while,
 * should the daemon not end it.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define STACK_BYTES (16 * 1024)
#define NAP_US 200000
#define LONGEST_MS 3600000
#define NR_CLOSE_RANGE 436 /* the same number on every architecture */
#define UNSHARE_DESCRIPTORS 2 /* CLOSE_RANGE_UNSHARE */

struct order {
	int64_t until_ns;
	int pid;
	int status; /* an errno */
};

static char stack[STACK_BYTES] __attribute__((aligned(16)));

static void live(int64_t until_ns)
{
	uint64_t all = ~(uint64_t)0;

	KERNEL(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, sizeof(all));
	KERNEL(SYS_setsid); /* signals of the job's group and terminal are not for it */
	while (now_ns() < until_ns)
		pause_us(NAP_US);
	for (;;)
		KERNEL(SYS_exit_group, 0);
}

static int between(void *argument)
{
	struct order *order = argument;
	long pid = KERNEL(NR_CLOSE_RANGE, 0, ~0U, UNSHARE_DESCRIPTORS);

	/* Before it exists: the daemon ends processes of this name that it has lost sight of. */
	KERNEL(SYS_prctl, PR_SET_NAME, "snapshim-twin", 0, 0, 0);
	if (pid == 0)
		pid = KERNEL(SYS_clone, CLONE_UNTRACED, 0, 0, 0, 0);
	if (pid == 0)
		live(order->until_ns);
	order->pid = pid > 0 ? (int)pid : 0;
	order->status = pid > 0 ? 0 : (int)-pid;
	return 0;
}

int twin(uint64_t life_ms)
{
	struct order order = {.until_ns = now_ns() + (int64_t)(life_ms < LONGEST_MS ? life_ms : LONGEST_MS) * 1000000,
			      .status = ESRCH}; /* should the one in between be killed */
	int reaper = 0, child;

	KERNEL(SYS_prctl, PR_GET_CHILD_SUBREAPER, &reaper, 0, 0, 0);
	if (reaper || KERNEL(SYS_getpid) == 1) {
		add_text("this process adopts orphans, and would notice the end of one that it has not made");
		return EBUSY;
	}
	child = clone(between, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_FS | CLONE_UNTRACED,
		      &order);
	if (child < 0) {
		add_text("no process can be made");
		return errno;
	}
	while (KERNEL(SYS_wait4, child, NULL, __WCLONE, NULL) == -EINTR)
		;
	if (order.status)
		add_text("no copy of this process can be made");
	snapshim_mailbox.result[0] = (uint64_t)order.pid;
	return order.status;
}
