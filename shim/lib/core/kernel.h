/* System calls without libc: no errno, no cancellation point, no lock; usable in signal handlers, vfork and fork children. */
#ifndef SNAPSHIM_KERNEL_H
#define SNAPSHIM_KERNEL_H

/* A counter of gcov between the assignments would overwrite the registers. */
#define NOT_COUNTED __attribute__((no_profile_instrument_function))

#if defined(__x86_64__)

NOT_COUNTED static inline long call_kernel(long number, long a, long b, long c, long d, long e, long f)
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

NOT_COUNTED static inline long call_kernel(long number, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}

#else
#error "libsnapshim is written for x86-64 and arm64"
#endif

/* Up to six arguments of any integer or pointer type; the rest are zero. A negative result is an errno. */
#define KERNEL_PICK(number, a, b, c, d, e, f, ...) \
	call_kernel((long)(number), (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define KERNEL(...) KERNEL_PICK(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)

#endif
