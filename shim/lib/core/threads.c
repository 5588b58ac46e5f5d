/* pthread_create, interposed: the first call starts our control thread, and the CUDA driver's own threads are recognised.
 *
 * Invariant: libc creates a job's thread exactly as requested, with the job's start routine and stack. A thread of the
 * driver is exempt from parking (exempt_threads.c).
 *
 * Which library a start routine is in is read from /proc/self/maps. dladdr would wait for the loader's lock, which a
 * thread inside dlopen may hold while it waits for the very thread that creates this one.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#define RANGES_MAX 64

SNAPSHIM_EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *),
				   void *argument);
SNAPSHIM_EXPORT void pthread_exit(void *value) __attribute__((noreturn));
SNAPSHIM_EXPORT void thrd_exit(int value) __attribute__((noreturn));

/* Mappings in which start routines were found before. Entries are only added. */
static struct range {
	uintptr_t from, to;
	uint32_t state; /* 0: free or being written, 1: some library, 2: the driver's */
} ranges[RANGES_MAX];
static uint32_t ranges_taken;

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

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	int saved = errno;
	int status;

	signals_guard();
	if (of_the_driver((uintptr_t)routine))
		status = create_driver_thread(thread, attributes, routine, argument);
	else
		status = libc_create_thread()(thread, attributes, routine, argument);
	if (status == 0)
		control_start();
	errno = saved;
	return status;
}

/* A program whose main thread has exited ends with its last thread, so our control thread must not be the last one. */
void pthread_exit(void *value)
{
	threads_resolve();
	if (self_tid() == self_pid())
		control_leader_left();
	libc_exit_thread(value);
}

void thrd_exit(int value)
{
	pthread_exit((void *)(intptr_t)value); /* as libc does it */
}
