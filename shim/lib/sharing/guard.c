/* Tells processes of this rank from others: a rank has a cgroup of its own.
 *
 * Invariant: a process of which this is not known counts as one of another rank. That costs a move, and nothing else: outside a
 * move the server answers both alike (memory/ipc_server.c).
 */
#define _GNU_SOURCE
#include "sharing.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#include "core/shim.h"

#define CGROUPS_BYTES 8192

bool sharing_moves(void)
{
	return true;
}

struct cgroup {
	char text[CGROUPS_BYTES]; /* of all hierarchies */
	const char *path; /* in that of version 2, which ranks are told apart by; up to the end of its line */
	size_t bytes;
};

/* False: it cannot be read, or is too long. */
static bool read_cgroup(const char *name, struct cgroup *into)
{
	long file = KERNEL(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC), bytes = 0, more = 1;
	const char *line = into->text, *end;

	if (file < 0)
		return false;
	while (more > 0 && bytes < CGROUPS_BYTES - 1) {
		more = KERNEL(SYS_read, file, into->text + bytes, CGROUPS_BYTES - 1 - bytes);
		bytes += more > 0 ? more : 0;
	}
	KERNEL(SYS_close, file);
	if (more)
		return false;
	into->text[bytes] = 0;
	while (line && strncmp(line, "0::", 3) != 0) {
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	end = line ? strchr(line, '\n') : NULL;
	if (!end)
		return false;
	into->path = line;
	into->bytes = (size_t)(end - line);
	return true;
}

/* Whether /proc is that of this process's pid namespace, in which the kernel tells who asks. */
static bool proc_is_ours(void)
{
	char link[16] = {0};

	return KERNEL(SYS_readlinkat, AT_FDCWD, "/proc/self", link, sizeof(link) - 1) > 0 && atol(link) == KERNEL(SYS_getpid);
}

bool sharing_is_inside(int pid)
{
	struct cgroup ours, theirs;
	char name[32];

	if (pid <= 0 || !proc_is_ours())
		return false;
	snprintf(name, sizeof(name), "/proc/%d/cgroup", pid);
	return read_cgroup(name, &theirs) && read_cgroup("/proc/self/cgroup", &ours) && ours.bytes == theirs.bytes &&
	       memcmp(ours.path, theirs.path, ours.bytes) == 0;
}
