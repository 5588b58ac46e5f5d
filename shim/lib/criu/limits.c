/* Preloaded into criu while it dumps: reads another user's resource limits without CAP_SYS_RESOURCE.
 *
 * Root in many containers and virtual machines lacks that capability. prlimit(2) of another user's process then returns
 * EPERM, and criu fails. /proc/PID/limits has the same values, one line per resource in the order of their numbers. Only
 * queries (no new limit) are answered here, and only after EPERM; every other call passes through unchanged.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static uint64_t number(const char *word)
{
	return strncmp(word, "unlimited", 9) == 0 ? UINT64_MAX : strtoull(word, NULL, 10);
}

/* "Max open files            1024                 524288               files": the columns start at byte 26. */
static int read_limit(pid_t pid, int resource, struct rlimit64 *limit)
{
	char path[64], text[4096];
	snprintf(path, sizeof path, "/proc/%d/limits", (int)pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t length = read(fd, text, sizeof text - 1);
	close(fd);
	if (length <= 0)
		return -1;
	text[length] = 0;
	char *line = text;
	for (int skip = 0; skip <= resource; skip++) { /* the first line is the heading */
		line = strchr(line, '\n');
		if (line == NULL)
			return -1;
		line++;
	}
	if (strnlen(line, 48) < 48)
		return -1;
	limit->rlim_cur = number(line + 26);
	limit->rlim_max = number(line + 47);
	return 0;
}

static long real_syscall(long n, long a, long b, long c, long d, long e, long f)
{
	static long (*next)(long, ...);
	if (next == NULL)
		*(void **)&next = dlsym(RTLD_NEXT, "syscall");
	return next(n, a, b, c, d, e, f);
}

EXPORT long syscall(long n, ...)
{
	va_list list;
	va_start(list, n);
	long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
	long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
	va_end(list);
	long answer = real_syscall(n, a, b, c, d, e, f);
	if (n == SYS_prlimit64 && answer == -1 && errno == EPERM && a != 0 && c == 0 && d != 0)
		return read_limit((pid_t)a, (int)b, (struct rlimit64 *)d) == 0 ? 0 : (errno = EPERM, -1);
	return answer;
}

EXPORT int prlimit64(pid_t pid, enum __rlimit_resource resource, const struct rlimit64 *fresh, struct rlimit64 *old)
{
	return (int)syscall(SYS_prlimit64, (long)pid, (long)resource, (long)fresh, (long)old, 0L, 0L);
}

EXPORT int prlimit(pid_t pid, enum __rlimit_resource resource, const struct rlimit *fresh, struct rlimit *old)
{
	return (int)syscall(SYS_prlimit64, (long)pid, (long)resource, (long)fresh, (long)old, 0L, 0L);
}
