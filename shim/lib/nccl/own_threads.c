/* Finds NCCL's own threads by their stacks, because they are named only if NCCL_SET_THREAD_NAME is set.
 *
 * The result decides whether NCCL is completely detached and whether a library can be unloaded. A thread that runs at that
 * moment has no stack that could be read: it is counted apart, so that the caller can look again. Stacks are read through
 * /proc/self/mem, where memory that has just been unmapped is an error and not a fault. A stack is read up to the end of its
 * mapping, where the guard of the next one begins: with a fixed size, hundreds of threads would cost a MiB each.
 *
 * A single address proves little: a stack keeps remains of calls that returned long ago. So it counts only if the thread's
 * start routine is NCCL's too. glibc keeps that, with its argument, in the thread's descriptor at the end of the stack. There
 * it is recognised by its link in the list of all descriptors, which the thread's id follows. Where none is found the address
 * alone counts.
 */
#define _GNU_SOURCE
#include "own_threads.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/shim.h"
#include "real.h"
#include "threads.h"

#define DEEPEST_BYTES (1 << 20)
#define DESCRIPTOR_BYTES 1792 /* from its link on: at least as much as glibc's has */
#define EXITING 0x4 /* PF_EXITING of <linux/sched.h>: no code of the program runs in it any more */

static bool known(int tid)
{
	for (struct nccl_thread *thread = thread_first(); thread; thread = thread->next)
		if (atomic_load(&thread->tid) == tid)
			return true;
	return false;
}

/* The main thread, and those of the shim and of the CUDA driver. None of them is NCCL's, and they may run at any moment. The
 * main thread's stack may hold old addresses of NCCL's, because it loaded the library. */
static bool is_exempt(int tid)
{
	if (tid == getpid() || tid == self_tid() || tid == LOAD(&snapshim_mailbox.thread) ||
	    tid == LOAD(&snapshim_mailbox.probe))
		return true;
	for (int i = 0; i < SNAPSHIM_EXEMPT_MAX; i++)
		if (tid == LOAD(&snapshim_mailbox.exempt[i]))
			return true;
	return false;
}

/* The file has "NR args… SP PC" for a thread that waits, "running" for one that does not. */
static uint64_t stack_pointer(int tid)
{
	char path[64], text[256] = "", *at, *last = NULL, *before = NULL;
	int file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", tid);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return 0;
	if (read(file, text, sizeof(text) - 1) < 0)
		text[0] = 0;
	close(file);
	for (at = text; *at; at++)
		if (at == text || at[-1] == ' ') {
			before = last;
			last = at;
		}
	return before ? strtoull(before, NULL, 16) : 0;
}

/* Not one that has ended, nor one that is exiting in the kernel: pthread_join has already returned for it. */
bool thread_exists(int tid)
{
	char path[64], text[512] = "", *name_end;
	unsigned long flags = 0;
	bool gone;
	int file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return errno != ENOENT;
	gone = read(file, text, sizeof(text) - 1) < 0 && errno == ESRCH;
	close(file);
	name_end = strrchr(text, ')'); /* a name may hold one */
	if (name_end)
		sscanf(name_end, ") %*c %*d %*d %*d %*d %*d %lu", &flags);
	return !gone && !(flags & EXITING);
}

struct range {
	uint64_t from, to;
};
struct ranges {
	struct range *sorted;
	size_t count, room;
};

/* The readable mappings; neighbours are one, because a stack may consist of several. Without memory some are missing. */
static struct ranges readable(void)
{
	struct ranges ranges = {0};
	struct mapping mapping;
	struct maps maps;

	if (!maps_open(&maps))
		return ranges;
	while (maps_next(&maps, &mapping)) {
		if (!mapping.readable)
			continue;
		if (ranges.count && ranges.sorted[ranges.count - 1].to == mapping.from) {
			ranges.sorted[ranges.count - 1].to = mapping.to;
			continue;
		}
		if (ranges.count == ranges.room) {
			size_t room = 2 * ranges.room + 256;
			struct range *sorted = realloc(ranges.sorted, room * sizeof(*sorted));

			if (!sorted)
				break;
			ranges.sorted = sorted;
			ranges.room = room;
		}
		ranges.sorted[ranges.count++] = (struct range){mapping.from, mapping.to};
	}
	maps_close(&maps);
	return ranges;
}

static int compare(const void *key, const void *element)
{
	uint64_t at = *(const uint64_t *)key;
	const struct range *range = element;

	return at < range->from ? -1 : at >= range->to;
}

/* A stack that was mapped after the list was read is read as far as a stack may reach. */
static uint64_t stack_end(const struct ranges *ranges, uint64_t at)
{
	const struct range *found =
		ranges->count ? bsearch(&at, ranges->sorted, ranges->count, sizeof(*found), compare) : NULL;

	return found && found->to - at < DEEPEST_BYTES ? found->to : at + DEEPEST_BYTES;
}

static bool is_inside(int memory, const struct ranges *ranges, uint64_t at, uint64_t from, uint64_t to)
{
	uint64_t words[512];

	for (uint64_t end = stack_end(ranges, at); at < end; at += sizeof(words)) {
		size_t bytes = end - at < sizeof(words) ? end - at : sizeof(words);
		ssize_t count = pread(memory, words, bytes, (off_t)at);

		if (count <= 0)
			return false; /* the stack's end */
		for (ssize_t i = 0; i < count / (ssize_t)sizeof(*words); i++)
			if (words[i] >= from && words[i] < to)
				return true;
	}
	return false;
}

/* Whether the two words at an address are a link of a list: its neighbours name it. */
static bool is_link(int memory, uint64_t at, const uint64_t *words)
{
	uint64_t back = 0, forth = 0;

	return pread(memory, &back, sizeof(back), (off_t)(words[0] + sizeof(back))) == sizeof(back) && back == at &&
	       pread(memory, &forth, sizeof(forth), (off_t)words[1]) == sizeof(forth) && forth == at;
}

/* Reads glibc's descriptor of the thread, from its link on; `at` is the thread's stack pointer. 0: it is not found. */
static size_t read_descriptor(int memory, const struct ranges *ranges, uint64_t at, int tid, uint64_t *words)
{
	uint64_t some[512], end = stack_end(ranges, at);

	while (at + 3 * sizeof(*some) <= end) {
		size_t bytes = end - at < sizeof(some) ? end - at : sizeof(some);
		ssize_t count = pread(memory, some, bytes, (off_t)at) / (ssize_t)sizeof(*some);

		for (ssize_t i = 0; i + 2 < count; i++)
			if ((uint32_t)some[i + 2] == (uint32_t)tid &&
			    is_link(memory, at + (uint64_t)i * sizeof(*some), some + i)) {
				bytes = DESCRIPTOR_BYTES;
				count = pread(memory, words, bytes, (off_t)(at + (uint64_t)i * sizeof(*some)));
				return count > 0 ? (size_t)count / sizeof(*words) : 0;
			}
		if (count < 3)
			return 0;
		at += (uint64_t)(count - 2) * sizeof(*some); /* a link may cross the border */
	}
	return 0;
}

/* Whether the thread's start routine is the library's: its address is in the descriptor, or its argument is an object of a
 * class of the library, as std::thread passes one. */
static bool may_have_started(const struct nccl_instance *library, int memory, const struct ranges *ranges, uint64_t at,
			     int tid)
{
	uint64_t words[DESCRIPTOR_BYTES / sizeof(uint64_t)], first;
	size_t count = read_descriptor(memory, ranges, at, tid, words);

	for (size_t i = 0; i < count; i++) {
		if (words[i] >= library->text_from && words[i] < library->text_to)
			return true;
		if (words[i] > DEEPEST_BYTES && pread(memory, &first, sizeof(first), (off_t)words[i]) == sizeof(first) &&
		    first >= library->image_from && first < library->image_to)
			return true;
	}
	return count == 0;
}

static int count_threads(const struct nccl_instance *library, bool started, int *unseen)
{
	int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC), inside = 0;
	DIR *tasks = opendir("/proc/self/task");
	struct ranges ranges = readable();
	struct dirent *task;

	while (memory >= 0 && tasks && (task = readdir(tasks))) {
		int tid = atoi(task->d_name);
		uint64_t at;

		if (tid <= 0 || is_exempt(tid) || known(tid))
			continue;
		at = stack_pointer(tid) & ~(uint64_t)7;
		if (at)
			inside += is_inside(memory, &ranges, at, library->text_from, library->text_to) &&
				  (!started || may_have_started(library, memory, &ranges, at, tid));
		else
			*unseen += thread_exists(tid);
	}
	*unseen += !tasks || memory < 0;
	free(ranges.sorted);
	if (tasks)
		closedir(tasks);
	if (memory >= 0)
		close(memory);
	return inside;
}

int threads_inside(const struct nccl_instance *library, int *unseen)
{
	return count_threads(library, false, unseen);
}

int threads_started_by(const struct nccl_instance *library, int *unseen)
{
	return count_threads(library, true, unseen);
}
