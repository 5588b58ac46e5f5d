/* Preloaded into criu while it restores a rank: uses the rank's paths with the rights of the rank's user.
 *
 * Criu is root, and opens, creates, links, renames and removes files by paths that the rank's user may change meanwhile.
 * Every call of it that takes a path of the rank therefore runs with the user's file-system ids and groups. The kernel then
 * also takes away the capabilities that override permissions, so a path that was swapped for a link leads nowhere the user
 * could not go. Credentials belong to a thread, and are put back before the call returns.
 *
 * SNAPSHOT_RANK_USER is "UID:GID:GROUP,GROUP,…", SNAPSHOT_IMAGES the directory of the images. Without them nothing changes.
 * Which paths are the rank's is decided in rank.c.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "rank.h"

#define EXPORT __attribute__((visibility("default")))
/* Also in kernels and C libraries that do not name it yet. */
#define FACCESSAT2 439

#define NEXT(name) next_function((void **)&next_##name, #name)

static void next_function(void **function, const char *name)
{
	if (*function == NULL && (*function = dlsym(RTLD_NEXT, name)) == NULL)
		abort();
}

/* ---- whose rights */

struct before {
	int changed;
	int user, group;
};

static struct before become_user(int folder, const char *path)
{
	struct before before = {0, 0, 0};
	if (!is_ranks(folder, path))
		return before;
	before.changed = 1;
	/* The C library's setgroups would change every thread. */
	if (syscall(SYS_setgroups, rank.count, rank.groups) != 0)
		abort();
	before.group = setfsgid(rank.group);
	before.user = setfsuid(rank.user);
	if (setfsuid((uid_t)-1) != (int)rank.user || setfsgid((gid_t)-1) != (int)rank.group)
		abort();
	return before;
}

static void become_root(struct before before)
{
	if (!before.changed)
		return;
	int error = errno;
	setfsuid((uid_t)before.user);
	setfsgid((gid_t)before.group);
	if (setfsuid((uid_t)-1) != before.user || syscall(SYS_setgroups, (size_t)rank.own_count, rank.own_groups) != 0)
		abort();
	errno = error;
}

/* Calls the next function of that name, as the user if the path is the rank's. */
#define AS_USER(folder, path, name, ...)                                                                                   \
	({                                                                                                                 \
		NEXT(name);                                                                                                \
		struct before before = become_user(folder, path);                                                          \
		int answer = next_##name(__VA_ARGS__);                                                                     \
		become_root(before);                                                                                       \
		answer;                                                                                                    \
	})

/* ---- opening */

/* A program that the user may execute but not read: criu needs it for a mapping, which execve would have made as well. */
static int open_program(int folder, const char *path, int flags)
{
	struct before before = become_user(folder, path);
	int there = (int)syscall(SYS_openat, folder, path, O_PATH | O_CLOEXEC, 0);
	int may = there >= 0 && syscall(FACCESSAT2, there, "", X_OK, AT_EACCESS | AT_EMPTY_PATH) == 0;
	struct stat found;
	may = may && fstat(there, &found) == 0 && S_ISREG(found.st_mode);
	become_root(before);
	int opened = -1;
	if (may) {
		char link[64] = "/proc/self/fd/";
		size_t at = strlen(link);
		char digits[16];
		size_t count = 0;
		for (int rest = there; rest > 0 || count == 0; rest /= 10)
			digits[count++] = (char)('0' + rest % 10);
		while (count > 0)
			link[at++] = digits[--count];
		opened = (int)syscall(SYS_openat, AT_FDCWD, link, flags, 0);
	}
	if (there >= 0)
		close(there);
	if (opened < 0)
		errno = EACCES;
	return opened;
}

static int open_as_user(int folder, const char *path, int flags, mode_t mode)
{
	notice_tree(path);
	struct before before = become_user(folder, path);
	/* Large files need no flag in a 64-bit process. */
	int opened = (int)syscall(SYS_openat, folder, path, flags, mode);
	become_root(before);
	if (opened < 0 && errno == EACCES && before.changed && (flags & (O_ACCMODE | O_CREAT | O_TRUNC)) == O_RDONLY)
		return open_program(folder, path, flags);
	return opened;
}

#define MODE(flags)                                                                                                        \
	({                                                                                                                 \
		mode_t mode = 0;                                                                                           \
		if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) {                                           \
			va_list list;                                                                                      \
			va_start(list, flags);                                                                             \
			mode = (mode_t)va_arg(list, unsigned);                                                             \
			va_end(list);                                                                                      \
		}                                                                                                          \
		mode;                                                                                                      \
	})

EXPORT int open(const char *path, int flags, ...)
{
	return open_as_user(AT_FDCWD, path, flags, MODE(flags));
}

EXPORT int open64(const char *path, int flags, ...)
{
	return open_as_user(AT_FDCWD, path, flags, MODE(flags));
}

EXPORT int openat(int folder, const char *path, int flags, ...)
{
	return open_as_user(folder, path, flags, MODE(flags));
}

EXPORT int openat64(int folder, const char *path, int flags, ...)
{
	return open_as_user(folder, path, flags, MODE(flags));
}

/* ---- names */

static int (*next_unlink)(const char *);
static int (*next_unlinkat)(int, const char *, int);
static int (*next_linkat)(int, const char *, int, const char *, int);
static int (*next_rename)(const char *, const char *);
static int (*next_symlink)(const char *, const char *);
static int (*next_symlinkat)(const char *, int, const char *);
static int (*next_mkdir)(const char *, mode_t);
static int (*next_mkdirat)(int, const char *, mode_t);
static int (*next_rmdir)(const char *);
static int (*next_mknod)(const char *, mode_t, dev_t);
static int (*next_chmod)(const char *, mode_t);
static int (*next_fchmodat)(int, const char *, mode_t, int);
static int (*next_fchownat)(int, const char *, uid_t, gid_t, int);
static int (*next_lutimes)(const char *, const struct timeval[2]);
static int (*next_bind)(int, const struct sockaddr *, socklen_t);
static int (*next_connect)(int, const struct sockaddr *, socklen_t);

EXPORT int unlink(const char *path)
{
	return AS_USER(AT_FDCWD, path, unlink, path);
}

EXPORT int unlinkat(int folder, const char *path, int flags)
{
	return AS_USER(folder, path, unlinkat, folder, path, flags);
}

/* Both paths are the rank's, or neither. A path that begins with /proc is criu's: it links a file by its descriptor. */
EXPORT int linkat(int from, const char *old, int to, const char *new, int flags)
{
	return AS_USER(to, new, linkat, from, old, to, new, flags);
}

EXPORT int rename(const char *old, const char *new)
{
	return AS_USER(AT_FDCWD, new, rename, old, new);
}

EXPORT int symlink(const char *target, const char *path)
{
	return AS_USER(AT_FDCWD, path, symlink, target, path);
}

EXPORT int symlinkat(const char *target, int folder, const char *path)
{
	return AS_USER(folder, path, symlinkat, target, folder, path);
}

EXPORT int mkdir(const char *path, mode_t mode)
{
	return AS_USER(AT_FDCWD, path, mkdir, path, mode);
}

EXPORT int mkdirat(int folder, const char *path, mode_t mode)
{
	return AS_USER(folder, path, mkdirat, folder, path, mode);
}

EXPORT int rmdir(const char *path)
{
	return AS_USER(AT_FDCWD, path, rmdir, path);
}

EXPORT int mknod(const char *path, mode_t mode, dev_t device)
{
	return AS_USER(AT_FDCWD, path, mknod, path, mode, device);
}

EXPORT int chmod(const char *path, mode_t mode)
{
	return AS_USER(AT_FDCWD, path, chmod, path, mode);
}

EXPORT int fchmodat(int folder, const char *path, mode_t mode, int flags)
{
	return AS_USER(folder, path, fchmodat, folder, path, mode, flags);
}

EXPORT int fchownat(int folder, const char *path, uid_t user, gid_t group, int flags)
{
	return AS_USER(folder, path, fchownat, folder, path, user, group, flags);
}

EXPORT int lutimes(const char *path, const struct timeval times[2])
{
	return AS_USER(AT_FDCWD, path, lutimes, path, times);
}

/* ---- sockets with a name */

/* The path of a unix socket's address; NULL for other sockets and for names that are no paths. */
static const char *path_of(const struct sockaddr *address, socklen_t length, char path[sizeof(struct sockaddr_un)])
{
	if (address == NULL || address->sa_family != AF_UNIX || length <= offsetof(struct sockaddr_un, sun_path) ||
	    length > sizeof(struct sockaddr_un))
		return NULL;
	size_t count = length - offsetof(struct sockaddr_un, sun_path);
	memcpy(path, ((const struct sockaddr_un *)address)->sun_path, count);
	path[count] = 0;
	return path[0] == 0 ? NULL : path;
}

EXPORT int bind(int fd, const struct sockaddr *address, socklen_t length)
{
	char path[sizeof(struct sockaddr_un)];
	const char *name = path_of(address, length, path);
	return AS_USER(AT_FDCWD, name, bind, fd, address, length);
}

EXPORT int connect(int fd, const struct sockaddr *address, socklen_t length)
{
	char path[sizeof(struct sockaddr_un)];
	const char *name = path_of(address, length, path);
	return AS_USER(AT_FDCWD, name, connect, fd, address, length);
}
