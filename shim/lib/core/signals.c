/* Keeps the reserved signal for the shim: its handler stays, and no thread of the job blocks it.
 *
 * From the process's first pthread_create on, a call that sets another handler, or a mask with that signal in it, gets the
 * answer that libc would have given, but does not change the signal itself. Before that, and for all other signals, every
 * call is libc's own. libc's functions are looked up in the constructor and not at the call: the calls must work in signal
 * handlers and vfork children, where dlsym does not. A call before the constructor can look them up safely.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>

#define RESERVED_BIT ((uint64_t)1 << (SNAPSHIM_SIGNAL - 1))

static int (*next_sigaction)(int, const struct sigaction *, struct sigaction *);
static void (*(*next_signal)(int, void (*)(int)))(int);
static int (*next_sigprocmask)(int, const sigset_t *, sigset_t *);
static int (*next_pthread_sigmask)(int, const sigset_t *, sigset_t *);
static int (*next_pthread_attr_setsigmask_np)(pthread_attr_t *, const sigset_t *);
static int (*next_sigsuspend)(const sigset_t *);
static int (*next_sigwait)(const sigset_t *, int *);
static int (*next_sigwaitinfo)(const sigset_t *, siginfo_t *);
static int (*next_sigtimedwait)(const sigset_t *, siginfo_t *, const struct timespec *);
static int (*next_signalfd)(int, const sigset_t *, int);
static int (*next_ppoll)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
static int (*next___ppoll_chk)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t);
static int (*next_pselect)(int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *);
static int (*next_epoll_pwait)(int, struct epoll_event *, int, int, const sigset_t *);
static int (*next_epoll_pwait2)(int, struct epoll_event *, int, const struct timespec *, const sigset_t *);

static const struct {
	const char *name;
	void *place;
} nexts[] = {
#define NEXT(name) {#name, &next_##name}
	NEXT(sigaction),  NEXT(signal),      NEXT(sigprocmask), NEXT(pthread_sigmask), NEXT(pthread_attr_setsigmask_np),
	NEXT(sigsuspend), NEXT(sigwait),     NEXT(sigwaitinfo), NEXT(sigtimedwait),    NEXT(signalfd),
	NEXT(ppoll),      NEXT(__ppoll_chk), NEXT(pselect),     NEXT(epoll_pwait),     NEXT(epoll_pwait2),
};

static uint32_t resolved;
static uint32_t guarded; /* 1: the handler is installed */

/* What the job believes. */
static struct sigaction believed_action;   /* of the reserved signal */
static uint64_t believed_in_masks;         /* bit n - 1: signal n's handler masks the reserved signal */
static __thread bool believed_blocked;     /* in this thread */

void signals_resolve(void)
{
	if (LOAD(&resolved))
		return;
	for (size_t i = 0; i < sizeof(nexts) / sizeof(*nexts); i++) {
		void *found = dlsym(RTLD_NEXT, nexts[i].name);

		memcpy(nexts[i].place, &found, sizeof(found));
	}
	STORE(&resolved, 1);
}

/* Only the first word: the kernel uses no more, and some callers' sets are no longer. */
static uint64_t word_of(const sigset_t *set)
{
	uint64_t word;

	memcpy(&word, set, sizeof(word));
	return word;
}

static void set_word(sigset_t *set, uint64_t word)
{
	memcpy(set, &word, sizeof(word));
}

/* Returns the set to pass on: the caller's own, or a copy without the reserved signal. */
static const sigset_t *without_ours(const sigset_t *set, sigset_t *copy)
{
	signals_resolve();
	if (!set || !LOAD(&guarded) || !(word_of(set) & RESERVED_BIT))
		return set;
	memset(copy, 0, sizeof(*copy));
	set_word(copy, word_of(set) & ~RESERVED_BIT);
	return copy;
}

/* The signal was not sent by the shim: it is the job's own, if the job has a handler for it. */
static void hand_to_the_job(int number, siginfo_t *info, void *context)
{
	struct sigaction action = believed_action;

	if (action.sa_flags & SA_SIGINFO)
		action.sa_sigaction(number, info, context);
	else if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN)
		action.sa_handler(number);
}

static void on_signal(int number, siginfo_t *info, void *context)
{
	if (info->si_code == SI_QUEUE && info->si_value.sival_ptr == &snapshim_mailbox)
		park_here(context);
	else
		hand_to_the_job(number, info, context);
}

/* The handler masks every signal, including libc's own two, because a cancelled thread must not unwind out of it. */
void signals_install(void)
{
	struct sigaction action, before;

	signals_resolve();
	memset(&action, 0, sizeof(action));
	action.sa_sigaction = on_signal;
	action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
	memset(&action.sa_mask, 0xff, sizeof(action.sa_mask));
	if (next_sigaction(SNAPSHIM_SIGNAL, &action, &before) == 0 && before.sa_sigaction != on_signal)
		believed_action = before;
}

/* Before the process's first thread is created, so that it inherits the mask. */
void signals_guard(void)
{
	uint64_t reserved = RESERVED_BIT, before = 0;

	if (LOAD(&guarded))
		return;
	signals_install();
	KERNEL(SYS_rt_sigprocmask, SIG_UNBLOCK, &reserved, &before, sizeof(reserved));
	believed_blocked = before & RESERVED_BIT;
	STORE(&guarded, 1);
}

SNAPSHIM_EXPORT int sigaction(int number, const struct sigaction *action, struct sigaction *before)
{
	struct sigaction given;
	uint64_t bit = number > 0 && number <= 64 ? (uint64_t)1 << (number - 1) : 0;
	bool masked, ours;
	int status;

	signals_resolve();
	if (!LOAD(&guarded))
		return next_sigaction(number, action, before);
	if (number == SNAPSHIM_SIGNAL) {
		given = believed_action;
		if (action)
			believed_action = *action;
		if (before)
			*before = given;
		return 0;
	}
	masked = LOAD(&believed_in_masks) & bit;
	ours = action && word_of(&action->sa_mask) & RESERVED_BIT;
	if (action) {
		given = *action;
		set_word(&given.sa_mask, word_of(&given.sa_mask) & ~RESERVED_BIT);
	}
	status = next_sigaction(number, action ? &given : NULL, before);
	if (status == 0 && ours)
		__atomic_or_fetch(&believed_in_masks, bit, __ATOMIC_ACQ_REL);
	else if (status == 0 && action)
		__atomic_and_fetch(&believed_in_masks, ~bit, __ATOMIC_ACQ_REL);
	if (status == 0 && before && masked)
		set_word(&before->sa_mask, word_of(&before->sa_mask) | RESERVED_BIT);
	return status;
}

SNAPSHIM_EXPORT void (*signal(int number, void (*handler)(int)))(int)
{
	void (*before)(int);

	signals_resolve();
	if (!LOAD(&guarded))
		return next_signal(number, handler);
	if (number == SNAPSHIM_SIGNAL && handler != SIG_ERR) {
		before = believed_action.sa_handler;
		memset(&believed_action, 0, sizeof(believed_action));
		believed_action.sa_handler = handler;
		set_word(&believed_action.sa_mask, RESERVED_BIT);
		believed_action.sa_flags = SA_RESTART;
		return before;
	}
	if (number > 0 && number <= 64)
		__atomic_and_fetch(&believed_in_masks, ~((uint64_t)1 << (number - 1)), __ATOMIC_ACQ_REL);
	return next_signal(number, handler);
}

static int change_mask(int (*next)(int, const sigset_t *, sigset_t *), int how, const sigset_t *set, sigset_t *before)
{
	sigset_t copy;
	bool ours = set && word_of(set) & RESERVED_BIT;
	bool believed = believed_blocked;
	int status;

	if (!LOAD(&guarded))
		return next(how, set, before);
	status = next(how, how == SIG_UNBLOCK ? set : without_ours(set, &copy), before);
	if (status != 0)
		return status;
	if (set && how == SIG_SETMASK)
		believed_blocked = ours;
	else if (ours)
		believed_blocked = how == SIG_BLOCK;
	if (before && believed)
		set_word(before, word_of(before) | RESERVED_BIT);
	return 0;
}

SNAPSHIM_EXPORT int sigprocmask(int how, const sigset_t *set, sigset_t *before)
{
	signals_resolve();
	return change_mask(next_sigprocmask, how, set, before);
}

SNAPSHIM_EXPORT int pthread_sigmask(int how, const sigset_t *set, sigset_t *before)
{
	signals_resolve();
	return change_mask(next_pthread_sigmask, how, set, before);
}

/* Also before the first thread is created, because the attributes apply to a thread. */
SNAPSHIM_EXPORT int pthread_attr_setsigmask_np(pthread_attr_t *attributes, const sigset_t *set)
{
	sigset_t copy;

	signals_resolve();
	if (!next_pthread_attr_setsigmask_np)
		return ENOSYS;
	signals_guard();
	return next_pthread_attr_setsigmask_np(attributes, without_ours(set, &copy));
}

/* Calls that wait with a mask, or for signals: the reserved signal is taken out, or parking would have to wait for them. */

SNAPSHIM_EXPORT int sigsuspend(const sigset_t *set)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_sigsuspend(set);
}

SNAPSHIM_EXPORT int sigwait(const sigset_t *set, int *number)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_sigwait(set, number);
}

SNAPSHIM_EXPORT int sigwaitinfo(const sigset_t *set, siginfo_t *info)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_sigwaitinfo(set, info);
}

SNAPSHIM_EXPORT int sigtimedwait(const sigset_t *set, siginfo_t *info, const struct timespec *timeout)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_sigtimedwait(set, info, timeout);
}

SNAPSHIM_EXPORT int signalfd(int fd, const sigset_t *set, int flags)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_signalfd(fd, set, flags);
}

SNAPSHIM_EXPORT int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *set)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_ppoll(fds, count, timeout, set);
}

SNAPSHIM_EXPORT int __ppoll_chk(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *set,
				size_t room)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next___ppoll_chk(fds, count, timeout, set, room);
}

SNAPSHIM_EXPORT int pselect(int count, fd_set *in, fd_set *out, fd_set *other, const struct timespec *timeout,
			    const sigset_t *set)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_pselect(count, in, out, other, timeout, set);
}

SNAPSHIM_EXPORT int epoll_pwait(int fd, struct epoll_event *events, int room, int timeout_ms, const sigset_t *set)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	return next_epoll_pwait(fd, events, room, timeout_ms, set);
}

SNAPSHIM_EXPORT int epoll_pwait2(int fd, struct epoll_event *events, int room, const struct timespec *timeout,
				 const sigset_t *set);
int epoll_pwait2(int fd, struct epoll_event *events, int room, const struct timespec *timeout, const sigset_t *set)
{
	sigset_t copy;

	set = without_ours(set, &copy);
	if (!next_epoll_pwait2) {
		errno = ENOSYS;
		return -1;
	}
	return next_epoll_pwait2(fd, events, room, timeout, set);
}
