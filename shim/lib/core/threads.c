/* pthread_create, interposed: the first one brings our control thread, and the CUDA driver's own threads are told apart.
 *
 * Invariant: a job's thread is created by libc exactly as asked, with its own start routine on its own stack. A thread of the
 * driver is created with all signals blocked, because signals to the process must wait, and not run a job's handler there,
 * while the job is parked; and it is never parked itself, because it does the driver's checkpoint.
 *
 * Which library a start routine is in is read from /proc/self/maps: dladdr would wait for the loader's lock, which a
 * thread inside dlopen may hold while it waits for the very thread that creates this one.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

#define RANGES_MAX 64

SNAPSHIM_EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument);
SNAPSHIM_EXPORT void pthread_exit(void *value) __attribute__((noreturn));
SNAPSHIM_EXPORT void thrd_exit(int value) __attribute__((noreturn));

/* One for each entry of the mailbox's `exempt`, which is -1 until the new thread has read its own. */
struct start {
	void *(*routine)(void *);
	void *argument;
};
static struct start starts[SNAPSHIM_EXEMPT_MAX];

/* Where start routines were found before; entries are only added. */
static struct range {
	uintptr_t from, to;
	uint32_t state; /* 0: free or being written, 1: some library, 2: the driver's */
} ranges[RANGES_MAX];
static uint32_t ranges_taken;

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

static bool digits(const char *from, int count)
{
	for (; count > 0; count--, from++)
		if (*from < '0' || *from > '9')
			return false;
	return *from == 0;
}

bool driver_thread(int tid, const struct task *task)
{
	for (int i = 0; i < SNAPSHIM_EXEMPT_MAX; i++)
		if (LOAD(&snapshim_mailbox.exempt[i]) == tid)
			return true;
	return strcmp(task->name, "cuda-EvtHandlr") == 0 || (strncmp(task->name, "cuda", 4) == 0 && digits(task->name + 4, 11));
}

static void remember(uintptr_t from, uintptr_t to, bool driver)
{
	uint32_t at = __atomic_fetch_add(&ranges_taken, 1, __ATOMIC_ACQ_REL);

	if (at >= RANGES_MAX) {
		STORE(&ranges_taken, RANGES_MAX); /* later ones are looked up each time */
		return;
	}
	ranges[at].from = from;
	ranges[at].to = to;
	STORE(&ranges[at].state, driver ? 2 : 1);
}

static bool of_the_driver(uintptr_t address)
{
	struct maps maps;
	struct mapping mapping;
	bool driver = false;

	for (int i = 0; i < RANGES_MAX; i++)
		if (LOAD(&ranges[i].state) && address >= ranges[i].from && address < ranges[i].to)
			return ranges[i].state == 2;
	if (!maps_open(&maps))
		return false;
	while (maps_next(&maps, &mapping))
		if (address >= mapping.from && address < mapping.to) {
			driver = strncmp(mapping.name, "libcuda.so", 10) == 0;
			remember(mapping.from, mapping.to, driver);
			break;
		}
	maps_close(&maps);
	return driver;
}

static void end_exempt_thread(void *slot)
{
	STORE((int32_t *)slot, 0);
}

static void *run_exempt_thread(void *given)
{
	struct start start = *(struct start *)given;
	int32_t *slot = &snapshim_mailbox.exempt[(struct start *)given - starts];
	void *value;

	STORE(slot, self_tid());
	/* However it ends: a thread id that is used again must not be exempt. */
	pthread_cleanup_push(end_exempt_thread, slot);
	value = start.routine(start.argument);
	pthread_cleanup_pop(1);
	return value;
}

/* While this is true a thread that nobody knows may be one of these. Its creator cannot be parked meanwhile. */
bool exempt_thread_coming(void)
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
		int32_t nobody = 0;

		if (SWAP_IF(&snapshim_mailbox.exempt[i], &nobody, -1))
			start = &starts[i];
	}
	if (start) {
		start->routine = routine;
		start->argument = argument;
		status = libc_create_thread()(thread, attributes, run_exempt_thread, start);
		if (status)
			STORE(&snapshim_mailbox.exempt[start - starts], 0);
	} else if (has_name) { /* more than anybody has seen: told apart by their names */
		status = libc_create_thread()(thread, attributes, routine, argument);
	} else { /* nobody could park it, and nobody would know why */
		status = EAGAIN;
	}
	set_signal_mask(mask);
	return status;
}

int create_exempt_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	return create_exempt(thread, attributes, routine, argument, false);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	int saved = errno;
	int status;

	signals_guard();
	if (of_the_driver((uintptr_t)routine)) {
		STORE(&driver_seen, true);
		status = create_exempt(thread, attributes, routine, argument, true);
	} else {
		status = libc_create_thread()(thread, attributes, routine, argument);
	}
	if (status == 0)
		control_start();
	errno = saved;
	return status;
}

/* A program whose main thread leaves ends with its last thread; ours must not be that one for ever. */
void pthread_exit(void *value)
{
	threads_resolve();
	if (self_tid() == self_pid())
		control_leader_left();
	libc_exit(value);
	__builtin_unreachable();
}

void thrd_exit(int value)
{
	pthread_exit((void *)(intptr_t)value); /* as libc does it */
}

void threads_forget(void)
{
	memset(snapshim_mailbox.exempt, 0, sizeof(snapshim_mailbox.exempt));
	driver_seen = false;
}
