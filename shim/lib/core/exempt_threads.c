/* Threads that are never parked: the CUDA driver's own, which do its checkpoint, and ours. They are listed in the
 * mailbox's `exempt`.
 *
 * All of them are created with every signal blocked. While the job is parked, a signal to the process must stay pending
 * and not run a handler of the job in one of these threads.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* One for each entry of `exempt`. The entry is -1 until the new thread has read its struct. */
struct start {
	void *(*routine)(void *);
	void *argument;
};
static struct start starts[SNAPSHIM_EXEMPT_MAX];

static create_thread_fn *libc_create;
static void (*libc_exit)(void *);

bool driver_seen;

void threads_resolve(void)
{
	if (LOAD(&libc_exit))
		return;
	STORE(&libc_create, (create_thread_fn *)dlsym(RTLD_NEXT, "pthread_create"));
	STORE(&libc_exit, (void (*)(void *))dlsym(RTLD_NEXT, "pthread_exit"));
}

create_thread_fn *libc_create_thread(void)
{
	threads_resolve();
	return libc_create;
}

void libc_exit_thread(void *value)
{
	threads_resolve();
	libc_exit(value);
	__builtin_unreachable();
}

static bool digits(const char *from, int count)
{
	for (; count > 0; count--, from++)
		if (*from < '0' || *from > '9')
			return false;
	return *from == 0;
}

bool is_exempt_thread(int tid, const struct task *task)
{
	for (int i = 0; i < SNAPSHIM_EXEMPT_MAX; i++)
		if (LOAD(&snapshim_mailbox.exempt[i]) == tid)
			return true;
	return strcmp(task->name, "cuda-EvtHandlr") == 0 ||
	       (strncmp(task->name, "cuda", 4) == 0 && digits(task->name + 4, 11));
}

static void end_exempt_thread(void *entry)
{
	STORE((int32_t *)entry, 0);
}

static void *run_exempt_thread(void *given)
{
	struct start start = *(struct start *)given;
	int32_t *entry = &snapshim_mailbox.exempt[(struct start *)given - starts];
	void *value;

	STORE(entry, self_tid());
	/* Runs however the thread ends: a thread id that the kernel reuses must not be exempt. */
	pthread_cleanup_push(end_exempt_thread, entry);
	value = start.routine(start.argument);
	pthread_cleanup_pop(1);
	return value;
}

bool exempt_thread_starting(void)
{
	for (int i = 0; i < SNAPSHIM_EXEMPT_MAX; i++)
		if (LOAD(&snapshim_mailbox.exempt[i]) == -1)
			return true;
	return false;
}

static int create_exempt(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument,
			 bool has_name)
{
	uint64_t mask = block_all_signals(); /* the new thread inherits it */
	struct start *start = NULL;
	int status;

	for (int i = 0; i < SNAPSHIM_EXEMPT_MAX && !start; i++) {
		int32_t unused = 0;

		if (SWAP_IF(&snapshim_mailbox.exempt[i], &unused, -1))
			start = &starts[i];
	}
	if (start) {
		start->routine = routine;
		start->argument = argument;
		status = libc_create_thread()(thread, attributes, run_exempt_thread, start);
		if (status)
			STORE(&snapshim_mailbox.exempt[start - starts], 0);
	} else if (has_name) { /* the table is full: is_exempt_thread recognises the driver's threads by name */
		status = libc_create_thread()(thread, attributes, routine, argument);
	} else { /* PARK would wait for a thread that blocks its signal */
		status = EAGAIN;
	}
	set_signal_mask(mask);
	return status;
}

int create_exempt_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	return create_exempt(thread, attributes, routine, argument, false);
}

/* A program may have set it after its start, which /proc/PID/environ does not show. */
static void note_visible_devices(void)
{
	char *visible = snapshim_mailbox.visible;
	const char *value = getenv("CUDA_VISIBLE_DEVICES");
	size_t length = value ? strnlen(value, SNAPSHIM_VISIBLE_BYTES) : 0;

	if (length + 2 > SNAPSHIM_VISIBLE_BYTES)
		return;
	if (value)
		memcpy(visible + 1, value, length);
	visible[1 + length] = 0;
	STORE(visible, value ? '=' : '-');
}

int create_driver_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	if (!LOAD(&driver_seen))
		note_visible_devices();
	STORE(&driver_seen, true);
	return create_exempt(thread, attributes, routine, argument, true);
}

void threads_forget(void)
{
	memset(snapshim_mailbox.exempt, 0, sizeof(snapshim_mailbox.exempt));
	driver_seen = false;
	snapshim_mailbox.visible[0] = 0;
}
