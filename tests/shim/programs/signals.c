/* Makes all signal calls that a program can make, also with the reserved signal (61), and prints the results, which must be
 * the same with and without the library. With an argument it prints the kernel's signal state of this process instead. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

static volatile int handled, with_info;

static void plain(int number)
{
	handled = number;
}

static void informed(int number, siginfo_t *info, void *context)
{
	handled = number;
	with_info = info->si_pid == getpid() && context != NULL;
}

static const char *name_of(void (*handler)(int))
{
	return handler == SIG_DFL ? "default" :
	       handler == SIG_IGN ? "ignored" :
	       handler == plain   ? "plain" :
	       handler == SIG_ERR ? "error" :
				    "other";
}

static void print_action(const char *what, int number)
{
	struct sigaction action;

	if (sigaction(number, NULL, &action) != 0) {
		printf("%s: %d: %s\n", what, number, strerror(errno));
		return;
	}
	printf("%s: %d: %s flags %x masks 61: %d masks 10: %d\n", what, number,
	       action.sa_flags & SA_SIGINFO ? "informed" : name_of(action.sa_handler),
	       (unsigned)action.sa_flags & ~0x04000000u, sigismember(&action.sa_mask, 61), sigismember(&action.sa_mask, 10));
}

static void print_mask(const char *what)
{
	sigset_t mask;

	if (pthread_sigmask(SIG_SETMASK, NULL, &mask) != 0)
		abort();
	printf("%s: blocked 61: %d 60: %d 10: %d 32: %d\n", what, sigismember(&mask, 61), sigismember(&mask, 60),
	       sigismember(&mask, 10), sigismember(&mask, 32));
}

static void ask_about_actions(void)
{
	static const int numbers[] = {1, 9, 10, 32, 34, 60, 61, 64, 0, 65, -1};
	struct sigaction action, before;

	for (unsigned i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
		print_action("first", numbers[i]);
	memset(&action, 0, sizeof(action));
	action.sa_sigaction = informed;
	action.sa_flags = SA_SIGINFO | SA_NODEFER;
	sigfillset(&action.sa_mask);
	for (unsigned i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
		errno = 0;
		printf("set %d: %d", numbers[i], sigaction(numbers[i], &action, &before));
		printf(" %s\n", errno ? strerror(errno) : "fine");
		print_action("then", numbers[i]);
	}
	errno = 55;
	raise(61);
	printf("handled %d with info %d errno %d\n", handled, with_info, errno);
	printf("signal 61: %s", signal(61, plain) == (void (*)(int))(void *)informed ? "informed" : "other");
	printf(", then %s\n", name_of(signal(61, plain)));
	print_action("signalled", 61);
	handled = 0;
	kill(getpid(), 61);
	printf("handled %d\n", handled);
	printf("signal 10: %s\n", signal(10, SIG_IGN) == (void (*)(int))(void *)informed ? "informed" : "other");
	print_action("signalled", 10);
	printf("signal 61: %s\n", name_of(signal(61, SIG_IGN)));
	kill(getpid(), 61);
	printf("signal 61: %s\n", name_of(signal(61, SIG_DFL)));
	printf("signal 0: %s %d\n", name_of(signal(0, plain)), errno);
	printf("signal 61 to nonsense: %s\n", name_of(signal(61, SIG_ERR)));
}

static void ask_about_masks(void)
{
	sigset_t all, some, before;
	sigset_t *volatile same = &some;

	sigfillset(&all);
	sigemptyset(&some);
	sigaddset(&some, 61);
	sigaddset(&some, 10);
	print_mask("start");
	printf("%d\n", sigprocmask(SIG_BLOCK, &some, &before));
	printf("before: %d %d\n", sigismember(&before, 61), sigismember(&before, 10));
	print_mask("blocked two");
	printf("%d\n", sigprocmask(SIG_SETMASK, &all, &before));
	printf("before: %d %d %d\n", sigismember(&before, 61), sigismember(&before, 10), sigismember(&before, 60));
	print_mask("blocked all");
	printf("%d\n", pthread_sigmask(SIG_UNBLOCK, &some, same)); /* one set for both */
	printf("before: %d %d %d\n", sigismember(&some, 61), sigismember(&some, 10), sigismember(&some, 60));
	print_mask("unblocked two");
	printf("%d\n", pthread_sigmask(SIG_SETMASK, &before, NULL));
	print_mask("two again");
	errno = 0;
	printf("%d %d\n", pthread_sigmask(99, &all, NULL), errno);
	printf("%d", sigprocmask(99, &all, NULL));
	printf(" %d\n", errno);
	sigemptyset(&some);
	printf("%d\n", sigprocmask(SIG_SETMASK, &some, NULL));
	print_mask("none");
}

static void wait_for_signals(void)
{
	struct timespec at_once = {0, 0}, soon = {0, 1000000};
	sigset_t set, before;
	siginfo_t info;
	int number = 0, fd;
	struct signalfd_siginfo read_info;
	struct epoll_event event;

	sigemptyset(&set);
	sigaddset(&set, 10);
	sigprocmask(SIG_BLOCK, &set, &before);
	sigaddset(&set, 61);
	errno = 0;
	printf("sigtimedwait %d", sigtimedwait(&set, &info, &at_once));
	printf(" %d\n", errno);
	kill(getpid(), 10);
	printf("sigwait %d %d\n", sigwait(&set, &number), number);
	kill(getpid(), 10);
	printf("sigwaitinfo %d %d\n", sigwaitinfo(&set, &info), info.si_pid == getpid());
	fd = signalfd(-1, &set, SFD_NONBLOCK);
	kill(getpid(), 10);
	printf("signalfd %ld %u\n", (long)read(fd, &read_info, sizeof(read_info)), read_info.ssi_signo);
	close(fd);
	signal(10, plain);
	sigfillset(&set);
	sigdelset(&set, 10);
	handled = 0;
	kill(getpid(), 10);
	printf("sigsuspend %d", sigsuspend(&set));
	printf(" %d %d\n", errno == EINTR, handled);
	printf("ppoll %d\n", ppoll(NULL, 0, &soon, &set));
	printf("pselect %d\n", pselect(0, NULL, NULL, NULL, &soon, &set));
	fd = epoll_create1(0);
	printf("epoll_pwait %d\n", epoll_pwait(fd, &event, 1, 1, &set));
	kill(getpid(), 10);
	printf("ppoll %d", ppoll(NULL, 0, NULL, &set));
	printf(" %d %d\n", errno == EINTR, handled);
	close(fd);
	sigprocmask(SIG_SETMASK, &before, NULL);
}

static void print_kernel(const char *what)
{
	char line[256];
	FILE *status = fopen("/proc/thread-self/status", "r");

	while (status && fgets(line, sizeof(line), status))
		if (strncmp(line, "SigBlk", 6) == 0 || strncmp(line, "SigCgt", 6) == 0)
			printf("%s %.6s %d\n", what, line, (int)(strtoull(line + 7, NULL, 16) >> 60 & 1));
	if (status)
		fclose(status);
}

static void *nothing(void *argument)
{
	if (argument)
		print_kernel("thread");
	return NULL;
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = plain};
	pthread_attr_t attributes;
	pthread_t thread;
	sigset_t all;

	(void)argv;
	sigfillset(&all);
	if (argc > 1) {
		print_kernel("alone");
		sigprocmask(SIG_BLOCK, &all, NULL);
		sigaction(61, &action, NULL);
		print_kernel("blocked alone");
		pthread_attr_init(&attributes);
		pthread_attr_setsigmask_np(&attributes, &all);
		pthread_create(&thread, &attributes, nothing, &all);
		pthread_join(thread, NULL);
		print_mask("believes");
		print_kernel("with a thread");
		signal(61, SIG_DFL);
		sigprocmask(SIG_SETMASK, &all, NULL);
		print_kernel("after everything");
		return 0;
	}
	for (int round = 0; round < 2; round++) { /* with a single thread, and after the first one */
		ask_about_actions();
		ask_about_masks();
		wait_for_signals();
		for (int number = 1; number < 65; number++)
			signal(number, SIG_DFL);
		pthread_create(&thread, NULL, nothing, NULL);
		pthread_join(thread, NULL);
	}
	return 0;
}
