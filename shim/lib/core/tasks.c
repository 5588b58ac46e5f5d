/* Lists the threads and descriptors of this process from /proc/self with system calls only: opendir and stdio allocate, and
 * a parked thread may hold the allocator's lock.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#define NUMBER_MAX 100000000 /* more than the kernel's largest pid and descriptor, and ten times it is still an int */

struct entry {
	uint64_t inode;
	int64_t offset;
	uint16_t bytes;
	uint8_t type;
	char name[];
};

/* "/proc/self/task/TID" + tail */
static void task_path(char *path, int tid, const char *tail)
{
	static const char head[] = "/proc/self/task/";
	char digits[12];
	int at = 0, count = 0;

	for (const char *from = head; *from; from++)
		path[at++] = *from;
	do
		digits[count++] = (char)('0' + tid % 10);
	while (tid /= 10);
	while (count)
		path[at++] = digits[--count];
	while (*tail)
		path[at++] = *tail++;
	path[at] = 0;
}

static int read_start(int tid, const char *file, char *buffer, int room)
{
	char path[64];
	long fd, count;

	task_path(path, tid, file);
	fd = KERNEL(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	count = KERNEL(SYS_read, fd, buffer, room - 1);
	KERNEL(SYS_close, fd);
	if (count < 0)
		count = 0;
	buffer[count] = 0;
	return (int)count;
}

int listing_open(struct listing *listing, const char *path)
{
	long fd = KERNEL(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_DIRECTORY);

	listing->fd = (int)fd;
	listing->at = listing->filled = 0;
	return fd < 0 ? (int)-fd : 0;
}

int listing_next(struct listing *listing)
{
	for (;;) {
		const struct entry *entry;
		int number = 0;

		if (listing->at >= listing->filled) {
			listing->at = 0;
			listing->filled = (int)KERNEL(SYS_getdents64, listing->fd, listing->buffer, sizeof(listing->buffer));
			if (listing->filled <= 0)
				return -1;
		}
		entry = (const struct entry *)(const void *)(listing->buffer + listing->at);
		listing->at += entry->bytes;
		if (entry->name[0] < '0' || entry->name[0] > '9')
			continue;
		for (const char *digit = entry->name; *digit >= '0' && *digit <= '9' && number < NUMBER_MAX; digit++)
			number = number * 10 + (*digit - '0');
		listing->name = entry->name;
		return number;
	}
}

void listing_close(struct listing *listing)
{
	KERNEL(SYS_close, listing->fd);
}

/* The link count of the directory is two more than there are threads. */
int listing_threads(const struct listing *listing)
{
	struct stat status;

	return KERNEL(SYS_fstat, listing->fd, &status) ? -1 : (int)status.st_nlink - 2;
}

/* "TID (name) S ...": the name may contain any character, also a parenthesis, so the last one ends it. */
void task_look(int tid, struct task *task)
{
	char line[256];
	int count = read_start(tid, "/stat", line, sizeof(line));
	int from = 0, to = 0, at = 0;

	task->state = 0;
	task->name[0] = 0;
	while (from < count && line[from] != '(')
		from++;
	for (int i = from; i < count; i++)
		if (line[i] == ')')
			to = i;
	if (to <= from || to + 2 >= count)
		return;
	for (from++; from < to && at < (int)sizeof(task->name) - 1; from++)
		task->name[at++] = line[from];
	task->name[at] = 0;
	task->state = line[to + 2];
}

bool task_blocks_signal(int tid)
{
	char text[4096];
	int count = read_start(tid, "/status", text, sizeof(text));

	for (int i = 0; i + 8 < count; i++) {
		uint64_t mask = 0;

		if (text[i] != '\n' || text[i + 1] != 'S' || text[i + 2] != 'i' || text[i + 3] != 'g' || text[i + 4] != 'B')
			continue;
		for (i += 8; i < count && text[i] != '\n'; i++) {
			char c = text[i];

			if (c >= '0' && c <= '9')
				mask = mask << 4 | (uint64_t)(c - '0');
			else if (c >= 'a' && c <= 'f')
				mask = mask << 4 | (uint64_t)(c - 'a' + 10);
		}
		return mask >> (SNAPSHIM_SIGNAL - 1) & 1;
	}
	return false;
}

/* The handler recognises the shim's signal by its value, because the job may send the same signal. */
long signal_thread(int tid)
{
	siginfo_t info;

	memset(&info, 0, sizeof(info));
	info.si_signo = SNAPSHIM_SIGNAL;
	info.si_code = SI_QUEUE;
	info.si_pid = self_pid();
	info.si_value.sival_ptr = &snapshim_mailbox;
	return KERNEL(SYS_rt_tgsigqueueinfo, info.si_pid, tid, SNAPSHIM_SIGNAL, &info);
}
