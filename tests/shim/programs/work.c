/* A job in one process: `work FILE KIND…` starts two threads of each kind. Each thread counts its steps in FILE, which is
 * mapped, so that a reader sees whether threads run. The main thread counts in slot 0. The program ends at EOF on stdin. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static volatile uint64_t *counters;
static volatile uint64_t signals;

static void fail(const char *what)
{
	perror(what);
	_exit(70);
}

static void *spin(void *slot)
{
	errno = 77;
	for (;;) {
		++*(volatile uint64_t *)slot;
		if (errno != 77)
			fail("errno was changed");
	}
	return NULL;
}

static void *allocate(void *slot)
{
	unsigned int seed = (unsigned int)(uintptr_t)slot;
	void *held[64] = {0};

	for (;; ++*(volatile uint64_t *)slot) {
		int at = rand_r(&seed) % 64;

		free(held[at]);
		held[at] = malloc((size_t)rand_r(&seed) % (at ? 3000 : 300000));
		if (!held[at])
			fail("malloc");
		memset(held[at], at, 16);
	}
	return NULL;
}

static void *doze(void *slot)
{
	struct timespec time = {0, 100000};

	for (;; ++*(volatile uint64_t *)slot)
		if (nanosleep(&time, NULL) != 0 && errno != EINTR)
			fail("nanosleep");
	return NULL;
}

/* Blocking calls that must not return early after a restart. */
static void *exchange(void *slot)
{
	int ends[2];
	char byte = 'x';

	if (pipe(ends))
		fail("pipe");
	for (;; ++*(volatile uint64_t *)slot) {
		if (write(ends[1], &byte, 1) != 1)
			fail("write");
		if (read(ends[0], &byte, 1) != 1)
			fail("read");
		sched_yield();
	}
	return NULL;
}

struct pair {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	int turn;
};
static struct pair pair = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
static int next_turn;

static void *take_turns(void *slot)
{
	int mine = __atomic_fetch_add(&next_turn, 1, __ATOMIC_SEQ_CST) % 2;

	for (;; ++*(volatile uint64_t *)slot) {
		pthread_mutex_lock(&pair.lock);
		while (pair.turn != mine)
			pthread_cond_wait(&pair.changed, &pair.lock);
		pair.turn = !mine;
		pthread_cond_broadcast(&pair.changed);
		pthread_mutex_unlock(&pair.lock);
	}
	return NULL;
}

static void *short_life(void *slot)
{
	++*(volatile uint64_t *)slot;
	return NULL;
}

static void *churn(void *slot)
{
	for (;;) {
		pthread_t threads[4];

		for (int i = 0; i < 4; i++)
			if (pthread_create(&threads[i], NULL, short_life, slot))
				fail("pthread_create");
		for (int i = 0; i < 4; i++)
			pthread_join(threads[i], NULL);
	}
	return NULL;
}

/* With a CPU affinity, libc makes the new thread wait for its creator with signals blocked. */
static void *churn_pinned(void *slot)
{
	pthread_attr_t attributes;
	cpu_set_t cpus;

	sched_getaffinity(0, sizeof(cpus), &cpus);
	pthread_attr_init(&attributes);
	pthread_attr_setaffinity_np(&attributes, sizeof(cpus), &cpus);
	for (;;) {
		pthread_t thread;

		if (pthread_create(&thread, &attributes, short_life, slot))
			fail("pthread_create");
		pthread_join(thread, NULL);
	}
	return NULL;
}

static void *spawn(void *slot)
{
	char *argv[] = {"true", NULL};

	for (;; ++*(volatile uint64_t *)slot) {
		pid_t child;
		int status;

		if (posix_spawn(&child, "/bin/true", NULL, NULL, argv, environ))
			fail("posix_spawn");
		if (waitpid(child, &status, 0) != child || status)
			fail("waitpid");
	}
	return NULL;
}

static void *fork_often(void *slot)
{
	for (;; ++*(volatile uint64_t *)slot) {
		int status;
		pid_t child = fork();

		if (child == 0)
			_exit(3);
		if (child < 0 || waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 3)
			fail("fork");
	}
	return NULL;
}

static void on_signal(int number)
{
	(void)number;
	signals++;
}

/* Runs handlers of the job that mask every signal. */
static void *signal_itself(void *slot)
{
	struct sigaction action = {.sa_handler = on_signal};

	sigfillset(&action.sa_mask);
	sigaction(SIGUSR2, &action, NULL);
	for (;; ++*(volatile uint64_t *)slot)
		pthread_kill(pthread_self(), SIGUSR2);
	return NULL;
}

/* Masks all signals most of the time. */
static void *mask_all(void *slot)
{
	sigset_t all, before;

	sigfillset(&all);
	for (;; ++*(volatile uint64_t *)slot) {
		if (pthread_sigmask(SIG_SETMASK, &all, &before))
			fail("pthread_sigmask");
		for (int i = 0; i < 100000; i++)
			__asm__ volatile("");
		if (pthread_sigmask(SIG_SETMASK, &before, NULL))
			fail("pthread_sigmask");
	}
	return NULL;
}

/* Calls that must not return before there is data: a step is counted before each call, and none after. */
static void *block(void *slot)
{
	static int next;
	int ends[2];
	char byte;
	sem_t never;

	++*(volatile uint64_t *)slot;
	switch (__atomic_fetch_add(&next, 1, __ATOMIC_SEQ_CST)) {
	case 0:
		if (pipe(ends))
			fail("pipe");
		(void)!read(ends[0], &byte, 1);
		fail("read came back");
		break;
	default:
		sem_init(&never, 0, 0);
		sem_wait(&never);
		fail("sem_wait came back");
	}
	return NULL;
}

static void *small_stack(void *slot)
{
	return spin(slot);
}

/* Cannot be parked: it blocks the signal without libc's functions. */
static void *stubborn(void *slot)
{
	uint64_t all = ~(uint64_t)0;

	prctl(PR_SET_NAME, "stubborn");
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, NULL, sizeof(all));
	for (;; ++*(volatile uint64_t *)slot)
		usleep(1000);
	return NULL;
}

/* Waits in vfork, where no signal reaches it, until SIGUSR1 ends the child. */
static void *in_vfork(void *slot)
{
	prctl(PR_SET_NAME, "in-vfork");
	for (;; ++*(volatile uint64_t *)slot) {
		pid_t child = vfork();

		if (child == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			pause();
			_exit(0);
		}
		waitpid(child, NULL, 0);
	}
	return NULL;
}

static int stay(struct dl_phdr_info *info, size_t bytes, void *slot)
{
	(void)info;
	(void)bytes;
	for (;; ++*(volatile uint64_t *)slot)
		usleep(1000);
	return 0;
}

/* Stays inside the loader and holds its lock. */
static void *hold_loader(void *slot)
{
	dl_iterate_phdr(stay, slot);
	return NULL;
}

/* Stays inside stdout and holds its lock, as a thread does whose output waits for a reader. */
static void *hold_stdout(void *slot)
{
	flockfile(stdout);
	stay(NULL, 0, slot);
	funlockfile(stdout);
	return NULL;
}

static const struct kind {
	const char *name;
	void *(*routine)(void *);
} kinds[] = {
	{"spin", spin},
	{"allocate", allocate},
	{"doze", doze},
	{"exchange", exchange},
	{"turns", take_turns},
	{"churn", churn},
	{"churn-pinned", churn_pinned},
	{"spawn", spawn},
	{"fork", fork_often},
	{"signal", signal_itself},
	{"mask", mask_all},
	{"small", small_stack},
	{"block", block},
	{"stubborn", stubborn},
	{"vfork", in_vfork},
	{"loader", hold_loader},
	{"stdout", hold_stdout},
};

int main(int argc, char **argv)
{
	int fd = open(argv[1], O_RDWR | O_CREAT, 0600);
	struct sigaction action = {.sa_handler = on_signal};
	struct pollfd input = {.fd = 0, .events = POLLIN};
	int slot = 1;

	if (fd < 0 || ftruncate(fd, 4096))
		fail(argv[1]);
	counters = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (counters == MAP_FAILED)
		fail("mmap");
	close(fd);
	sigaction(SIGUSR1, &action, NULL);
	for (int i = 2; i < argc; i++)
		for (unsigned int k = 0; k < sizeof(kinds) / sizeof(*kinds); k++) {
			pthread_attr_t attributes;

			if (strcmp(argv[i], kinds[k].name) != 0)
				continue;
			pthread_attr_init(&attributes);
			if (kinds[k].routine == small_stack)
				pthread_attr_setstacksize(&attributes, (size_t)sysconf(_SC_THREAD_STACK_MIN));
			for (int copy = 0; copy < 2; copy++) {
				pthread_t thread;

				if (pthread_create(&thread, &attributes, kinds[k].routine, (void *)&counters[slot++]))
					fail("pthread_create");
			}
		}
	/* Slot 100: signals that this program has handled. */
	for (;; counters[0]++) {
		char byte;

		counters[100] = signals;
		if (poll(&input, 1, 1) == 1 && read(0, &byte, 1) == 0)
			return 0;
	}
}
