/* Checks the whole library under AddressSanitizer, in a process that allocates, forks and creates threads continuously. Its
 * parent acts as the daemon through /proc/PID/mem. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi.h"

#define THREADS 6
#define ROUNDS 30

#define EXPECT(condition)                                                                   \
	do {                                                                                \
		if (!(condition)) {                                                         \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
			if (child > 0)                                                      \
				kill(child, SIGKILL);                                       \
			exit(1);                                                            \
		}                                                                           \
	} while (0)

static pid_t child;
static volatile uint64_t *steps; /* shared between the two */
static int memory = -1;

static void *short_life(void *argument)
{
	return argument;
}

static void *work(void *argument)
{
	volatile uint64_t *step = argument;
	sigset_t all, before;

	sigfillset(&all);
	for (;; ++*step) {
		char *block = malloc(100 + *step % 5000);
		pthread_t thread;

		memset(block, 1, 100);
		pthread_sigmask(SIG_BLOCK, &all, &before);
		free(block);
		pthread_sigmask(SIG_SETMASK, &before, NULL);
		if (*step % 64 == 0 && pthread_create(&thread, NULL, short_life, NULL) == 0)
			pthread_join(thread, NULL);
		if (*step % 512 == 0) {
			pid_t forked = fork();

			if (forked == 0)
				_exit(0);
			waitpid(forked, NULL, 0);
		}
	}
	return NULL;
}

static void run_job(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int i = 0; i < THREADS; i++) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, work, (void *)&steps[i]))
			_exit(1);
	}
	for (;;)
		pause();
}

static struct snapshim_mailbox look(void)
{
	struct snapshim_mailbox box;

	EXPECT(pread(memory, &box, sizeof(box), (off_t)(uintptr_t)&snapshim_mailbox) == sizeof(box));
	return box;
}

static struct snapshim_mailbox ask(uint32_t command, uint64_t timeout_ms)
{
	struct snapshim_mailbox box = look();
	off_t at = (off_t)(uintptr_t)&snapshim_mailbox;
	uint32_t request = box.request + 1;
	uint64_t argument[4] = {timeout_ms, 0, 0, 0};

	EXPECT(pwrite(memory, &command, sizeof(command), at + (off_t)offsetof(struct snapshim_mailbox, command)) ==
	       sizeof(command));
	EXPECT(pwrite(memory, argument, sizeof(argument), at + (off_t)offsetof(struct snapshim_mailbox, argument)) ==
	       sizeof(argument));
	EXPECT(pwrite(memory, &request, sizeof(request), at + (off_t)offsetof(struct snapshim_mailbox, request)) ==
	       sizeof(request));
	EXPECT(syscall(SYS_tgkill, child, box.thread, SNAPSHIM_SIGNAL) == 0);
	while ((box = look()).answer != request)
		usleep(500);
	return box;
}

static uint64_t sum(void)
{
	uint64_t total = 0;

	for (int i = 0; i < THREADS; i++)
		total += steps[i];
	return total;
}

int main(void)
{
	struct snapshim_mailbox box;
	char path[64];

	steps = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	EXPECT(steps != MAP_FAILED);
	child = fork();
	if (child == 0)
		run_job();
	snprintf(path, sizeof(path), "/proc/%d/mem", (int)child);
	memory = open(path, O_RDWR);
	EXPECT(memory >= 0);
	while (look().owner != child || sum() == 0)
		usleep(1000);
	EXPECT(memcmp(look().magic, "SNAPSHIM", 8) == 0 && look().abi == SNAPSHIM_ABI_VERSION);

	for (int round = 0; round < ROUNDS; round++) {
		uint64_t before;

		box = ask(SNAPSHIM_PARK, 30000);
		if (box.status)
			fprintf(stderr, "%d: %s\n", box.status, box.text);
		EXPECT(box.status == 0 && box.parked == 1 && box.parked_threads >= THREADS + 1);
		before = sum();
		usleep(1000);
		EXPECT(sum() == before);
		box = ask(SNAPSHIM_RELEASE, 30000);
		EXPECT(box.status == 0 && box.parked == 0 && box.parked_threads == 0);
		while (sum() == before)
			usleep(100);
	}
	box = ask(SNAPSHIM_EMPTY_CACHE, 1000);
	EXPECT(box.status == ENOSYS && strstr(box.text, "no Python"));
	box = ask(99, 1000);
	EXPECT(box.status == EINVAL && strcmp(box.text, "this library does not know command 99") == 0);
	EXPECT(waitpid(child, NULL, WNOHANG) == 0);
	kill(child, SIGKILL);
	return 0;
}
