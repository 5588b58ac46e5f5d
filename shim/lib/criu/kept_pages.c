/* Preloaded into criu while it restores, with files.c: keeps pages in the images that other processes still have to read.
 *
 * criu removes pages from a file as soon as it has restored them. It restores a parent before its children, which take the
 * pages that they share with it from the same file (snapshotd/criu/layers.py). Those are not removed. What the code removes
 * that criu leaves in a restored process does not come here: by then every process has read what it takes from others.
 *
 * SNAPSHOT_KEPT_PAGES names a file of records: inode of a file, start and end of a range in it, sorted. If it is there and
 * cannot be read, nothing is removed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

struct kept {
	uint64_t inode, start, end;
};

static struct {
	const struct kept *ranges;
	size_t count;
	int all;
} kept;

static int next_fallocate(int fd, int mode, off64_t offset, off64_t length)
{
	static int (*next)(int, int, off64_t, off64_t);
	if (next == NULL && (*(void **)&next = dlsym(RTLD_NEXT, "fallocate64")) == NULL)
		abort();
	return next(fd, mode, offset, length);
}

__attribute__((constructor)) static void read_kept(void)
{
	const char *path = getenv("SNAPSHOT_KEPT_PAGES");
	struct stat stat;

	if (path == NULL)
		return;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		kept.all = errno != ENOENT;
		return;
	}
	if (fstat(fd, &stat) != 0)
		kept.all = 1;
	else if (stat.st_size > 0) {
		void *mapped = mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (mapped == MAP_FAILED)
			kept.all = 1;
		else {
			kept.ranges = mapped;
			kept.count = (size_t)stat.st_size / sizeof *kept.ranges;
		}
	}
	close(fd);
}

/* The first range of the file that ends behind the offset, or the end of all ranges. */
static size_t first_behind(uint64_t inode, uint64_t offset)
{
	size_t low = 0, high = kept.count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;
		const struct kept *range = &kept.ranges[middle];
		if (range->inode < inode || (range->inode == inode && range->end <= offset))
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Removes what lies between the kept ranges. */
static int remove_between(int fd, int mode, uint64_t inode, uint64_t at, uint64_t end)
{
	for (size_t range = first_behind(inode, at); at < end; range++) {
		int more = range < kept.count && kept.ranges[range].inode == inode && kept.ranges[range].start < end;
		uint64_t until = more ? kept.ranges[range].start : end;
		if (at < until && next_fallocate(fd, mode, (off64_t)at, (off64_t)(until - at)) != 0)
			return -1;
		at = more ? kept.ranges[range].end : end;
	}
	return 0;
}

EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t length)
{
	struct stat file;

	if ((mode & FALLOC_FL_PUNCH_HOLE) == 0 || (kept.count == 0 && !kept.all))
		return next_fallocate(fd, mode, offset, length);
	if (kept.all || fstat(fd, &file) != 0)
		return 0;
	return remove_between(fd, mode, file.st_ino, (uint64_t)offset, (uint64_t)(offset + length));
}

EXPORT int fallocate(int fd, int mode, off_t offset, off_t length)
{
	return fallocate64(fd, mode, offset, length);
}
