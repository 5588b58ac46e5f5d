/* Keeps a process dumpable: refuses io_uring, which CRIU cannot dump, and AMX tiles, which it does not save.
 *
 * libuv (torch's TCPStore) and others call io_uring_setup through libc's syscall(). On ENOSYS they use epoll, as they do
 * on older kernels. Invariant: every other call, its result and errno are exactly libc's. Nothing is ever printed or
 * allocated, and no symbol is looked up before the first call, so any program can run with this preloaded.
 *
 * The call is made here and not by libc's syscall (through dlsym): dlsym takes locks and may itself call syscall(), and
 * this wrapper must work in vfork children and signal handlers, where the original does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>

#include "abi.h"
#include "kernel.h"

#define NR_IO_URING_SETUP 425 /* the same number on every architecture */

/* A restored process has lost the permission to use AMX, and its next tile instruction would raise SIGILL. Without
 * the permission oneDNN uses AVX-512. */
#define NR_ARCH_PRCTL 158
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

const unsigned int snapshim_abi_version = SNAPSHIM_ABI_VERSION;

/* In a separate section: thread_location.c has to distinguish it from the rest of the shim. */
__attribute__((section("snapshim_syscall"))) long syscall(long number, ...)
{
	va_list list;
	long a, b, c, d, e, f, result;

	/* As in libc: six arguments are read, whether the caller passed them or not. */
	va_start(list, number);
	a = va_arg(list, long);
	b = va_arg(list, long);
	c = va_arg(list, long);
	d = va_arg(list, long);
	e = va_arg(list, long);
	f = va_arg(list, long);
	va_end(list);

	if (number == NR_IO_URING_SETUP) {
		errno = ENOSYS;
		return -1;
	}
#if defined(__x86_64__)
	if (number == NR_ARCH_PRCTL && a == ARCH_REQ_XCOMP_PERM && b == XFEATURE_XTILEDATA) {
		errno = EOPNOTSUPP;
		return -1;
	}
#endif
	result = call_kernel(number, a, b, c, d, e, f);
	if (result < 0 && result > -4096) {
		errno = (int)-result;
		return -1;
	}
	return result;
}
