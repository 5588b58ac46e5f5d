/* Preloaded into criu while it dumps, with limits.c: does not show criu the pages that its image is to leave out.
 *
 * Those pages reach the target in another way: with the image of the process's parent, with which it shares them, or before
 * the freeze (snapshotd/criu/below.py, which also adds them to the pagemaps afterwards). criu asks the kernel for the pages of
 * a process with the ioctl PAGEMAP_SCAN of its pagemap. Here the ranges in between are asked for instead, one after the other.
 * Another way of asking gets the kernel's own answer: the pages are then in the image as well, which is only slower.
 *
 * SNAPSHOT_HIDDEN_PAGES names a file of records: pid, start and end of a range, sorted. Without it nothing changes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/ioctl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* Also in kernels' headers that do not have them yet. */
struct page_region {
	uint64_t start, end, categories;
};

struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

#define PAGEMAP_SCAN _IOWR('f', 16, struct scan)

struct hidden {
	uint64_t pid, start, end;
};

static struct {
	const struct hidden *ranges;
	size_t count;
} hidden;

static int next_ioctl(int fd, unsigned long request, void *argument)
{
	static int (*next)(int, unsigned long, ...);
	if (next == NULL && (*(void **)&next = dlsym(RTLD_NEXT, "ioctl")) == NULL)
		abort();
	return next(fd, request, argument);
}

__attribute__((constructor)) static void read_hidden(void)
{
	const char *path = getenv("SNAPSHOT_HIDDEN_PAGES");
	struct stat stat;

	if (path == NULL)
		return;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (fstat(fd, &stat) == 0 && (size_t)stat.st_size >= sizeof *hidden.ranges) {
		void *mapped = mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (mapped != MAP_FAILED) {
			hidden.ranges = mapped;
			hidden.count = (size_t)stat.st_size / sizeof *hidden.ranges;
		}
	}
	close(fd);
}

/* The process whose pagemap this is; 0 if it is something else. The link is ".../PID/pagemap". */
static uint64_t pid_of(int fd)
{
	static const char end[] = "/pagemap";
	char name[64], path[PATH_MAX];

	snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
	ssize_t length = readlink(name, path, sizeof path - 1);
	if (length <= (ssize_t)sizeof end)
		return 0;
	path[length] = 0;
	char *last = path + length - (sizeof end - 1);
	if (strcmp(last, end) != 0)
		return 0;
	*last = 0;
	const char *number = strrchr(path, '/');
	return number == NULL ? 0 : strtoull(number + 1, NULL, 10);
}

/* The first range of the process that ends behind the address, or the end of all ranges. */
static size_t first_behind(uint64_t pid, uint64_t address)
{
	size_t low = 0, high = hidden.count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;
		const struct hidden *range = &hidden.ranges[middle];
		if (range->pid < pid || (range->pid == pid && range->end <= address))
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Asks for what lies between the hidden ranges. Stops like the kernel, at the end or when the vector is full. */
static int scan_between(int fd, uint64_t pid, struct scan *asked)
{
	uint64_t at = asked->start, filled = 0;
	size_t range = first_behind(pid, at);

	while (at < asked->end) {
		int more = range < hidden.count && hidden.ranges[range].pid == pid && hidden.ranges[range].start < asked->end;
		uint64_t until = more ? hidden.ranges[range].start : asked->end;
		if (at < until) {
			struct scan part = *asked;
			part.start = at;
			part.end = until;
			part.vec += filled * sizeof(struct page_region);
			part.vec_len -= filled;
			int found = next_ioctl(fd, PAGEMAP_SCAN, &part);
			if (found < 0)
				return found;
			filled += (uint64_t)found;
			if (part.walk_end < until || filled == asked->vec_len) {
				asked->walk_end = part.walk_end;
				return (int)filled;
			}
		}
		at = more && hidden.ranges[range].end < asked->end ? hidden.ranges[range].end : asked->end;
		range += (size_t)more;
	}
	asked->walk_end = asked->end;
	return (int)filled;
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
	va_list list;
	va_start(list, request);
	void *argument = va_arg(list, void *);
	va_end(list);
	if (request == PAGEMAP_SCAN && hidden.count != 0) {
		struct scan *asked = argument;
		uint64_t pid = pid_of(fd);
		/* A limit of pages would have to be shared among the parts: criu sets none. */
		if (pid != 0 && asked->size == sizeof *asked && asked->max_pages == 0 && asked->vec_len != 0)
			return scan_between(fd, pid, asked);
	}
	return next_ioctl(fd, request, argument);
}
