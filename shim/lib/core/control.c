/* The control thread: waits for the reserved signal, carries out the mailbox's command, and answers in the mailbox.
 *
 * It starts with the process's second thread, so single-threaded programs are not affected, and a forked child has none
 * until it creates a thread. It blocks every signal, holds no descriptor, and while the job is parked it takes no lock
 * and allocates no memory.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define CONTROL_STACK_BYTES (256 * 1024)
#define LEADER_LEFT_POLL_NS 20000000

static int claimed;     /* the process whose control thread is being started or runs */
static bool leader_left; /* the main thread has called pthread_exit */

static int dispatch(uint32_t command, int64_t timeout_ns)
{
	switch (command) {
	case SNAPSHIM_PARK:
		return park(timeout_ns, snapshim_mailbox.argument[1]);
	case SNAPSHIM_RELEASE:
		if (LOAD(&snapshim_mailbox.device_offloaded)) {
			add_text("the job's device memory is offloaded: it must be back on the GPU before a thread may run");
			return EBUSY;
		}
		if (LOAD(&snapshim_mailbox.ipc_closed)) {
			add_text("device memory that processes share is closed: open it before a thread may run");
			return EBUSY;
		}
		if (!memory_lets_run()) {
			add_text("the job's device memory is being replaced by its own: a call into CUDA has not returned");
			return EBUSY;
		}
		return release(timeout_ns);
	case SNAPSHIM_EMPTY_CACHE:
		return empty_cache(timeout_ns);
	case SNAPSHIM_NCCL_ATTACH:
		if (LOAD(&snapshim_mailbox.device_offloaded)) {
			add_text("the job's device memory is offloaded: it must be back on the GPU before NCCL's "
				 "communicators are built");
			return EBUSY;
		}
		return nccl_dispatch(command, timeout_ns);
	case SNAPSHIM_NCCL_ROOM ... SNAPSHIM_NCCL_FRESH:
	case SNAPSHIM_NCCL_CLOSE_DEVICES:
	case SNAPSHIM_NCCL_DEVICES:
		return nccl_dispatch(command, timeout_ns);
	case SNAPSHIM_MEMORY_OPEN ... SNAPSHIM_MEMORY_DROP:
	case SNAPSHIM_MEMORY_HAND_OVER ... SNAPSHIM_MEMORY_IPC_OPEN:
		return memory_dispatch(command, timeout_ns);
	case SNAPSHIM_TRACK_OPEN:
	case SNAPSHIM_TRACK_CLOSE:
		return tracking_dispatch(command);
	case SNAPSHIM_TWIN:
		return twin(snapshim_mailbox.argument[1]);
	default:
		add_text("this library does not know command ");
		add_number((long)command);
		return EINVAL;
	}
}

static void serve(void)
{
	struct snapshim_mailbox *box = &snapshim_mailbox;
	uint32_t request;

	while ((request = LOAD(&box->request)) != box->answer) {
		uint64_t timeout_ms = box->argument[0] < 86400000 ? box->argument[0] : 86400000;

		box->text[0] = 0;
		memset(box->result, 0, sizeof(box->result));
		box->status = dispatch(box->command, (int64_t)timeout_ms * 1000000);
		STORE(&box->answer, request);
	}
}

/* Does what libc does when the main thread has left and the last other thread ends. */
static void end_with_the_last_thread(void)
{
	struct listing tasks;
	struct task task;
	bool others = false;
	int tid;

	if (listing_open(&tasks, TASKS))
		return;
	while ((tid = listing_next(&tasks)) > 0) {
		if (tid == snapshim_mailbox.thread || tid == snapshim_mailbox.probe || memory_has_thread(tid))
			continue;
		task_look(tid, &task);
		others |= task.state != 0 && task.state != 'Z' && task.state != 'X';
	}
	listing_close(&tasks);
	if (!others)
		exit(0);
}

static void *control(void *argument)
{
	uint64_t reserved = (uint64_t)1 << (SNAPSHIM_SIGNAL - 1);

	(void)argument;
	prctl(PR_SET_NAME, "snapshim");
	__atomic_store_n(&snapshim_mailbox.thread, self_tid(), __ATOMIC_SEQ_CST);
	STORE(&snapshim_mailbox.owner, self_pid());
	for (;;) {
		struct timespec limit;
		int64_t limit_ns;
		bool alone = __atomic_load_n(&leader_left, __ATOMIC_SEQ_CST);

		serve();
		if (alone)
			end_with_the_last_thread();
		limit_ns = tracking_wait_ns();
		if (alone && limit_ns > LEADER_LEFT_POLL_NS)
			limit_ns = LEADER_LEFT_POLL_NS;
		limit.tv_sec = limit_ns / 1000000000;
		limit.tv_nsec = limit_ns % 1000000000;
		KERNEL(SYS_rt_sigtimedwait, &reserved, NULL, limit_ns == FOREVER ? NULL : &limit, sizeof(reserved));
	}
	return NULL;
}

static int create(void)
{
	pthread_attr_t attributes;
	pthread_t thread;
	int status;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, CONTROL_STACK_BYTES);
	status = libc_create_thread()(&thread, &attributes, control, NULL);
	pthread_attr_destroy(&attributes);
	if (status == EINVAL) { /* programs with much thread-local data need larger stacks */
		pthread_attr_init(&attributes);
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		status = libc_create_thread()(&thread, &attributes, control, NULL);
		pthread_attr_destroy(&attributes);
	}
	return status;
}

/* Called after the job's own thread was created, so that ours never takes the last thread that a limit allows. If it
 * cannot start now, the creation of the next thread tries again. */
void control_start(void)
{
	int pid = self_pid();
	int before = LOAD(&claimed);
	uint64_t mask;

	if (before == pid || !SWAP_IF(&claimed, &before, pid))
		return;
	if (before) { /* a child that fork() did not create, so that our fork handler has not run */
		control_forget();
		STORE(&claimed, pid);
	}
	mask = block_all_signals();
	if (create() != 0)
		STORE(&claimed, 0);
	set_signal_mask(mask);
}

/* The control thread may be about to start: either it sees the flag that is set here, or its thread id is seen here. */
void control_leader_left(void)
{
	int tid;

	__atomic_store_n(&leader_left, true, __ATOMIC_SEQ_CST);
	tid = LOAD(&claimed) == self_pid() ? __atomic_load_n(&snapshim_mailbox.thread, __ATOMIC_SEQ_CST) : 0;
	if (tid > 0)
		KERNEL(SYS_tgkill, self_pid(), tid, SNAPSHIM_SIGNAL);
}

/* In a forked child: it has only this thread, nothing is parked, and all counts are zero. */
void control_forget(void)
{
	snapshim_mailbox.owner = 0;
	snapshim_mailbox.thread = 0;
	snapshim_mailbox.answer = snapshim_mailbox.request;
	snapshim_mailbox.managed_allocations = 0;
	snapshim_mailbox.ipc_exports = 0;
	snapshim_mailbox.ipc_imports = 0;
	leader_left = false;
	claimed = 0;
	park_forget();
	probe_forget();
	threads_forget();
	safepoint_forget();
	nccl_forget();
	memory_forget();
}
