/* Interrupts a thread at several locations and prints what thread_location.c reports for each. cuda.c is libcuda.so.1. */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "core/shim.h"

extern int cuSleep(void), cuSleepInCall(void), cuSpin(volatile int *), cuFill(volatile int *);

struct snapshim_mailbox snapshim_mailbox;
static volatile int here; /* 1: the thread is where it is to be interrupted, 2: it ends */
static enum place place;
static sem_t seen;

static void look(int number, siginfo_t *about, void *context)
{
	(void)number, (void)about;
	place = place_in(context);
	here = 2;
	sem_post(&seen);
}

static int sleep_here(void)
{
	return pause();
}

static int spin(volatile int *word)
{
	for (*word = 1; *word == 1;)
		;
	return 0;
}

static const struct {
	const char *name;
	int (*sleeps)(void), (*runs)(volatile int *);
} kinds[] = {{"sleeps", sleep_here, NULL},
	     {"runs", NULL, spin},
	     {"sleeps in the driver", cuSleep, NULL},
	     {"sleeps in our syscall() for the driver", cuSleepInCall, NULL},
	     {"runs in the driver", NULL, cuSpin},
	     {"runs in libc for the driver", NULL, cuFill}};

static _Atomic int tid;

static void *go(void *number)
{
	tid = self_tid();
	if (kinds[*(int *)number].sleeps)
		kinds[*(int *)number].sleeps();
	else
		kinds[*(int *)number].runs(&here);
	return NULL;
}

/* Whether the thread sleeps in its only system call that takes long. */
static bool sleeps(void)
{
	char path[64], state = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	file = fopen(path, "r");
	if (!file || fscanf(file, "%*d (places) %c", &state) != 1)
		state = 0;
	if (file)
		fclose(file);
	return state == 'S';
}

int main(void)
{
	static const char *const names[] = {[PLACE_FREE] = "free",
					    [PLACE_DOUBTFUL] = "doubtful",
					    [PLACE_DRIVER] = "driver",
					    [PLACE_DRIVER_SLEEPS] = "sleeps there"};
	struct sigaction action = {.sa_sigaction = look, .sa_flags = SA_SIGINFO};

	sem_init(&seen, 0, 0);
	sigaction(SIGUSR1, &action, NULL);
	places_find();
	for (int i = 0; i < (int)(sizeof(kinds) / sizeof(*kinds)); i++) {
		pthread_t thread;

		here = tid = 0;
		pthread_create(&thread, NULL, go, &i);
		while (kinds[i].sleeps ? !tid || !sleeps() : !here)
			usleep(100);
		pthread_kill(thread, SIGUSR1);
		sem_wait(&seen);
		pthread_join(thread, NULL);
		printf("%s: %s\n", kinds[i].name, names[place]);
	}
	return 0;
}
