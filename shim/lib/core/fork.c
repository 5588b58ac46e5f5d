/* The library's constructor, and its handler for forked children, which removes the parent's GPU state.
 *
 * A child of a CUDA process inherits the driver's descriptors and mappings. It cannot use them, and CRIU cannot dump a
 * process that has them. So mappings of /dev/nvidia* become reserved, empty address space, and the descriptors are closed.
 * Everything else stays, also pinned host memory (/dev/zero). Nothing is removed if the parent only uses NVML (no
 * /dev/nvidia-uvm, no thread of the driver), because its children may use NVML too. Children of vfork share their parent's
 * memory and are not changed. The handler runs between fork and the child's first instruction: it makes system calls only,
 * and does not allocate.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define DEVICES "/dev/nvidia"
#define UNIFIED_MEMORY "/dev/nvidia-uvm"
#define USERFAULTFD "anon_inode:[userfaultfd]"

static bool starts_with(const char *text, const char *head)
{
	return strncmp(text, head, strlen(head)) == 0;
}

/* Calls `visit` with each descriptor and its target, until it returns true. */
static bool each_descriptor(bool (*visit)(int fd, const char *target, const void *argument), const void *argument)
{
	struct listing listing;
	bool found = false;
	int fd;

	if (listing_open(&listing, "/proc/self/fd"))
		return false;
	while (!found && (fd = listing_next(&listing)) >= 0) {
		char target[64];
		long bytes =
			fd == listing.fd ? 0 : KERNEL(SYS_readlinkat, listing.fd, listing.name, target, sizeof(target) - 1);

		if (bytes > 0) {
			target[bytes] = 0;
			found = visit(fd, target, argument);
		}
	}
	listing_close(&listing);
	return found;
}

static bool is_unified_memory(int fd, const char *target, const void *argument)
{
	(void)fd;
	(void)argument;
	return starts_with(target, UNIFIED_MEMORY);
}

static bool close_if_under(int fd, const char *target, const void *head)
{
	if (starts_with(target, head))
		KERNEL(SYS_close, fd);
	return false;
}

static void drop_mappings(void)
{
	struct maps maps;
	struct mapping mapping;

	if (!maps_open(&maps))
		return;
	while (maps_next(&maps, &mapping))
		if (starts_with(mapping.path, DEVICES))
			KERNEL(SYS_mmap, mapping.from, mapping.to - mapping.from, PROT_NONE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	maps_close(&maps);
}

/* The parent's control thread may have been listing its threads at that moment. */
static void close_listings_of(int parent)
{
	char head[32] = "/proc/";
	char digits[12];
	int at = 6, count = 0;

	do
		digits[count++] = (char)('0' + parent % 10);
	while (parent /= 10);
	while (count)
		head[at++] = digits[--count];
	memcpy(head + at, "/task", 6);
	each_descriptor(close_if_under, head);
}

static void in_the_child(void)
{
	int saved = errno;
	int parent = snapshim_mailbox.owner;
	bool spoken_to = snapshim_mailbox.request != 0;
	bool driver = LOAD(&driver_seen);

	control_forget();
	if (tracking_forget())
		each_descriptor(close_if_under, USERFAULTFD);
	if (spoken_to && parent > 0)
		close_listings_of(parent);
	if (driver || each_descriptor(is_unified_memory, NULL)) {
		drop_mappings();
		each_descriptor(close_if_under, DEVICES);
	}
	errno = saved;
}

__attribute__((constructor)) static void begin(void)
{
	int saved = errno;

	threads_resolve();
	signals_resolve();
	pthread_atfork(NULL, NULL, in_the_child);
	errno = saved;
}
