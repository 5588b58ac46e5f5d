/* The text of /proc/self, which quotes names that a user chose, and of /proc/PID/limits: core/maps.c, core/tasks.c,
 * nccl/own_threads.c and criu/limits.c, with the input instead of the kernel's files.
 *
 * The first byte chooses the parser, the second how many bytes each read returns.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "input.h"

static struct input file;
static size_t piece;

static long give(char *buffer, size_t room)
{
	size_t bytes = room < piece ? room : piece;

	if (bytes > file.left)
		bytes = file.left;
	memcpy(buffer, file.at, bytes);
	file.at += bytes;
	file.left -= bytes;
	return (long)bytes;
}

/* One record of getdents64, whose name is a piece of the input as far as a name can be one. */
static long give_entry(char *buffer)
{
	char name[256] = "";
	uint16_t bytes;
	size_t length = 0;

	if (file.left == 0)
		return 0;
	while (length < sizeof(name) - 1 && file.left > 0) {
		char c = (char)take(&file, 1);

		if (c == 0 || c == '/')
			break;
		name[length++] = c;
	}
	bytes = (uint16_t)((19 + length + 1 + 7) & ~(size_t)7);
	memset(buffer, 0, bytes);
	memcpy(buffer + 16, &bytes, sizeof(bytes));
	memcpy(buffer + 19, name, length + 1);
	return bytes;
}

static long kernel(long number, long a, long b, long c)
{
	(void)a;
	switch (number) {
	case SYS_openat:
		return 3;
	case SYS_read:
		return give((char *)b, (size_t)c);
	case SYS_getdents64:
		return give_entry((char *)b);
	case SYS_fstat:
		memset((void *)b, 0, sizeof(struct stat));
		return 0;
	default:
		return 0;
	}
}

#define SNAPSHIM_KERNEL_H
#define KERNEL_PICK(number, a, b, c, ...) kernel((long)(number), (long)(a), (long)(b), (long)(c))
#define KERNEL(...) KERNEL_PICK(__VA_ARGS__, 0, 0, 0, 0)
#include "core/maps.c"
#include "core/tasks.c"

struct snapshim_mailbox snapshim_mailbox;

int self_pid(void)
{
	return 7;
}

int self_tid(void)
{
	return 1;
}

#define open(...) 3
#define read(fd, buffer, room) give(buffer, room)
#define close(fd) (void)(fd)
#include "nccl/own_threads.c"

struct nccl_thread *thread_first(void)
{
	return NULL;
}

#define syscall limits_syscall
#include "criu/limits.c"
#undef syscall
#undef open
#undef read
#undef close

static void walk_maps(void)
{
	struct maps maps;
	struct mapping mapping;

	EXPECT(maps_open(&maps));
	for (size_t most = file.left + 2; maps_next(&maps, &mapping); most--) {
		EXPECT(most > 0); /* every one consumes some of the text */
		EXPECT(strlen(mapping.path) < sizeof(mapping.path) && strlen(mapping.name) < sizeof(mapping.name));
		EXPECT(!strchr(mapping.name, '/') && !strchr(mapping.path, '\n'));
	}
	maps_close(&maps);
}

/* A line as the kernel writes it, with any path: nothing in the path changes another field. */
static void one_mapping(void)
{
	struct input path = file;
	char line[8192];
	int length = snprintf(line, sizeof(line), "7f00-8f00 r-xp 00001000 08:01 55                         /");
	struct maps maps;
	struct mapping mapping;

	for (; path.left > 0 && length < (int)sizeof(line) - 64; path.at++, path.left--)
		if (*path.at == '\n')
			length += snprintf(line + length, 5, "\\012");
		else if (*path.at)
			line[length++] = (char)*path.at;
	length += snprintf(line + length, 64, "\n9000-a000 rw-p 00000000 00:00 0 \n");
	file = (struct input){(const uint8_t *)line, (size_t)length};
	EXPECT(maps_open(&maps) && maps_next(&maps, &mapping));
	EXPECT(mapping.from == 0x7f00 && mapping.to == 0x8f00 && mapping.executable && mapping.path[0] == '/');
	EXPECT(maps_next(&maps, &mapping));
	EXPECT(mapping.from == 0x9000 && mapping.to == 0xa000 && !mapping.executable && !mapping.path[0]);
	EXPECT(!maps_next(&maps, &mapping));
}

/* A line as the kernel writes it, with any name of a thread. */
static void one_task(void)
{
	char line[64], name[16] = "";
	size_t length = 0;
	struct task task;

	for (size_t i = 0; i < file.left && length < sizeof(name) - 1; i++)
		if (file.at[i])
			name[length++] = (char)file.at[i];
	length = (size_t)snprintf(line, sizeof(line), "41 (%s) S 1 2 3 0 -1 4194304 0\n", name);
	file = (struct input){(const uint8_t *)line, length};
	piece = length;
	task_look(41, &task);
	EXPECT(task.state == 'S' && strcmp(task.name, name) == 0);
}

static void limits(int resource)
{
	struct rlimit64 limit = {1, 2};

	read_limit(1, resource, &limit);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct input input = {data, bytes};
	unsigned int parser = (unsigned int)take(&input, 1);
	struct listing listing;
	struct task task;

	piece = 1 + (size_t)take(&input, 1) * 4;
	file = input;
	switch (parser % 8) {
	case 0:
		walk_maps();
		break;
	case 1:
		one_mapping();
		break;
	case 2:
		task_look(7, &task);
		EXPECT(strlen(task.name) < sizeof(task.name));
		break;
	case 3:
		one_task();
		break;
	case 4:
		task_blocks_signal(7);
		break;
	case 5:
		EXPECT(listing_open(&listing, TASKS) == 0);
		for (int number; (number = listing_next(&listing)) >= 0;)
			EXPECT(listing.name[0] >= '0' && listing.name[0] <= '9');
		break;
	case 6:
		if (parser & 0x80)
			stack_pointer(7);
		else
			thread_exists(7);
		break;
	default:
		limits((int)(parser >> 3) % RLIM_NLIMITS);
	}
	return 0;
}
