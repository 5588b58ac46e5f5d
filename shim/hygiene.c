/* Keeps a process dumpable: no io_uring, which CRIU cannot dump.
 *
 * libuv (torch's TCPStore) and others call io_uring_setup through libc's syscall(); told ENOSYS they use epoll, as they do on
 * any older kernel. Invariant: every other call, its result and errno are exactly libc's. Nothing is printed, ever,
 * nothing is allocated, and nothing is looked up before the first call, so any program can run with this preloaded.
 *
 * The call is made here and not by libc's syscall (through dlsym): dlsym takes locks and may itself call syscall(), and
 * this wrapper must work in vfork children and signal handlers, where the original does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>

#include "abi.h"

#define NR_IO_URING_SETUP 425 /* the same number on every architecture */

const unsigned int snapshim_abi_version = SNAPSHIM_ABI_VERSION;

#if defined(__x86_64__)

static long call_kernel(long number, long a, long b, long c, long d, long e, long f)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}

#elif defined(__aarch64__)

static long call_kernel(long number, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
			 : "memory");
	return x0;
}

#else
#error "libsnapshim is written for x86-64 and arm64"
#endif

long syscall(long number, ...)
{
	va_list list;
	long a, b, c, d, e, f, result;

	/* As libc does: six are taken, whether the caller gave them or not. */
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
	result = call_kernel(number, a, b, c, d, e, f);
	if (result < 0 && result > -4096) {
		errno = (int)-result;
		return -1;
	}
	return result;
}
