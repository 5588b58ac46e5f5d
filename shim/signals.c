#define _GNU_SOURCE
#include "shim.h"

#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>

static uint32_t guarded;

static void on_signal(int number, siginfo_t *info, void *context)
{
	(void)number; (void)context;
	if (info->si_code == SI_QUEUE && info->si_value.sival_ptr == &snapshim_mailbox)
		park_here();
}

void signals_install(void)
{
	struct sigaction action;
	memset(&action, 0, sizeof(action));
	action.sa_sigaction = on_signal;
	action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
	memset(&action.sa_mask, 0xff, sizeof(action.sa_mask));
	sigaction(SNAPSHIM_SIGNAL, &action, NULL);
}

void signals_guard(void)
{
	uint64_t reserved = (uint64_t)1 << (SNAPSHIM_SIGNAL - 1);

	if (LOAD(&guarded))
		return;
	signals_install();
	KERNEL(SYS_rt_sigprocmask, SIG_UNBLOCK, &reserved, NULL, sizeof(reserved));
	STORE(&guarded, 1);
}
