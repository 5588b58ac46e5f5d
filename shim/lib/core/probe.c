/* Checks whether a parked thread holds a lock that the driver's threads, or NCCL's, will need: the allocator's, the loader's,
 * the thread library's, or that of stdout or stderr, to which NCCL writes its log while communicators are built.
 *
 * A thread of ours, which is never parked, takes each of them once. The job does not run meanwhile, so a probe that sleeps
 * for a while would sleep until the job is released. The probe's state decides and not the time alone, because walking the
 * free lists of a large heap takes long without sleeping.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define ASLEEP_LOOKS 10 /* a millisecond apart */
#define PROBE_STACK_BYTES (256 * 1024)

static uint32_t asked, done;
static const char *stage;
static void (*walk_arenas)(void);
static void *volatile kept; /* so that the compiler cannot leave an allocation out */

/* mallinfo2 returns a struct of ten size_t, whose content is ignored here. glibc before 2.33 lacks it: then the
 * probe only allocates. */
struct ten_sizes {
	size_t sizes[10];
};
static struct ten_sizes (*arena_totals)(void);

static void walk_with_mallinfo(void)
{
	struct ten_sizes totals = arena_totals();

	kept = (void *)totals.sizes[0];
}

/* A thread's first allocation takes an arena from the free list, and its end puts it back: both take separate locks. */
static void *allocate_once(void *argument)
{
	void *volatile memory = malloc(24);

	free(memory);
	return argument;
}

static int first_only(struct dl_phdr_info *info, size_t bytes, void *argument)
{
	(void)info;
	(void)bytes;
	(void)argument;
	return 1;
}

static void take_once(FILE *stream)
{
	if (stream) {
		flockfile(stream);
		funlockfile(stream);
	}
}

static void try_all(void)
{
	static const size_t sizes[] = {24, 200, 2000, 20000, 100000, 4 << 20};
	pthread_t thread;
	Dl_info info;

	STORE(&stage, "the allocator's lock");
	if (walk_arenas)
		walk_arenas();
	for (unsigned int i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		kept = malloc(sizes[i]);
		free(kept);
	}
	STORE(&stage, "the loader's lock");
	dl_iterate_phdr(first_only, NULL);
	dladdr((const void *)&asked, &info);
	STORE(&stage, "the thread library's lock");
	if (libc_create_thread()(&thread, NULL, allocate_once, NULL) == 0)
		pthread_join(thread, NULL);
	STORE(&stage, "the lock of stdout");
	take_once(stdout);
	STORE(&stage, "the lock of stderr");
	take_once(stderr);
	STORE(&stage, NULL);
}

static void *probe(void *argument)
{
	(void)argument;
	prctl(PR_SET_NAME, "snapshim-probe");
	STORE(&snapshim_mailbox.probe, self_tid());
	for (;;) {
		uint32_t request = LOAD(&asked);

		if (request == LOAD(&done)) {
			wait_word(&asked, request, FOREVER);
			continue;
		}
		try_all();
		STORE(&done, request);
		wake_word(&done);
	}
	return NULL;
}

/* Nothing is parked yet, so this may look up symbols and allocate. The new thread inherits a mask that blocks all signals. */
int probe_start(void)
{
	pthread_attr_t attributes;
	pthread_t thread;
	int status;

	if (LOAD(&snapshim_mailbox.probe))
		return 0;
	arena_totals = (struct ten_sizes (*)(void))dlsym(RTLD_DEFAULT, "mallinfo2");
	walk_arenas = arena_totals ? walk_with_mallinfo : NULL;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, PROBE_STACK_BYTES);
	status = libc_create_thread()(&thread, &attributes, probe, NULL);
	if (status == EINVAL) { /* programs with much thread-local data need larger stacks */
		pthread_attr_destroy(&attributes);
		pthread_attr_init(&attributes);
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		status = libc_create_thread()(&thread, &attributes, probe, NULL);
	}
	pthread_attr_destroy(&attributes);
	while (status == 0 && !LOAD(&snapshim_mailbox.probe))
		pause_us(50);
	return status;
}

static const char *held(void)
{
	const char *lock = LOAD(&stage);

	return lock ? lock : "a lock";
}

/* Waits until a probe that was blocked has finished. */
const char *probe_settle(int64_t until_ns)
{
	for (;;) {
		uint32_t before = LOAD(&done);

		if (before == asked)
			return NULL;
		if (now_ns() >= until_ns)
			return held();
		wait_word(&done, before, 1000000);
	}
}

const char *probe_run(int64_t until_ns)
{
	struct task task;
	int asleep = 0;

	STORE(&asked, asked + 1);
	wake_word(&asked);
	for (;;) {
		uint32_t before = LOAD(&done);

		if (before == asked)
			return NULL;
		wait_word(&done, before, 1000000);
		if (LOAD(&done) == asked)
			return NULL;
		task_look(snapshim_mailbox.probe, &task);
		asleep = task.state == 'S' ? asleep + 1 : 0;
		if (asleep >= ASLEEP_LOOKS || now_ns() >= until_ns)
			return held();
	}
}

void probe_forget(void)
{
	snapshim_mailbox.probe = 0;
	asked = done = 0;
}
