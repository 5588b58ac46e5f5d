/* Reads /proc/self/maps line by line with system calls only: no stdio, no allocation, so that a forked child can use it. */
#define _GNU_SOURCE
#include "shim.h"

#include <fcntl.h>
#include <stddef.h>
#include <sys/syscall.h>

bool maps_open(struct maps *maps)
{
	maps->fd = (int)KERNEL(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC);
	maps->at = maps->filled = 0;
	return maps->fd >= 0;
}

void maps_close(struct maps *maps)
{
	KERNEL(SYS_close, maps->fd);
}

static int next_byte(struct maps *maps)
{
	if (maps->at >= maps->filled) {
		maps->at = 0;
		maps->filled = (int)KERNEL(SYS_read, maps->fd, maps->buffer, sizeof(maps->buffer));
		if (maps->filled <= 0) {
			maps->filled = 0;
			return -1;
		}
	}
	return (unsigned char)maps->buffer[maps->at++];
}

static uintptr_t hexadecimal(struct maps *maps)
{
	uintptr_t number = 0;

	for (int c = next_byte(maps);; c = next_byte(maps)) {
		if (c >= '0' && c <= '9')
			number = number << 4 | (uintptr_t)(c - '0');
		else if (c >= 'a' && c <= 'f')
			number = number << 4 | (uintptr_t)(c - 'a' + 10);
		else
			return number;
	}
}

/* "from-to perms offset device inode   path": the path may contain spaces, and is truncated. */
bool maps_next(struct maps *maps, struct mapping *mapping)
{
	unsigned int path = 0, name = 0;
	int c;

	mapping->from = hexadecimal(maps);
	mapping->to = hexadecimal(maps);
	mapping->readable = mapping->executable = false;
	for (int field = 1; field < 5; field++)
		do {
			c = next_byte(maps);
			mapping->readable |= field == 1 && c == 'r';
			mapping->executable |= field == 1 && c == 'x';
			if (c < 0)
				return false;
		} while (c != ' ' && c != '\n');
	do
		c = next_byte(maps);
	while (c == ' ');
	for (; c >= 0 && c != '\n'; c = next_byte(maps)) {
		if (path < sizeof(mapping->path) - 1)
			mapping->path[path++] = (char)c;
		if (c == '/')
			name = 0;
		else if (name < sizeof(mapping->name) - 1)
			mapping->name[name++] = (char)c;
	}
	mapping->path[path] = 0;
	mapping->name[name] = 0;
	return true;
}
