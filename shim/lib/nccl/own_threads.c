/* Finds NCCL's own threads by their stacks, because they are named only if NCCL_SET_THREAD_NAME is set.
 *
 * The result decides whether NCCL is completely detached and whether a library can be unloaded, so a false positive is
 * harmless and a false negative is not. Stacks are read through /proc/self/mem, where memory that has just been unmapped
 * is an error and not a fault.
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
#include "threads.h"

#define DEEPEST_BYTES (1 << 20)
#define EXITING 0x4 /* PF_EXITING of <linux/sched.h>: no code of the program runs in it any more */

static bool known(int tid)
{
	for (struct nccl_thread *thread = thread_first(); thread; thread = thread->next)
		if (atomic_load(&thread->tid) == tid)
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

/* A thread that runs or cannot be inspected counts. One that has ended does not, nor one that is exiting in the kernel:
 * pthread_join has already returned for it. */
static bool still_there(int tid)
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

static bool is_inside(int memory, int tid, uint64_t from, uint64_t to)
{
	uint64_t words[512], at = stack_pointer(tid) & ~(uint64_t)7;

	if (!at)
		return still_there(tid);
	for (uint64_t end = at + DEEPEST_BYTES; at < end; at += sizeof(words)) {
		ssize_t count = pread(memory, words, sizeof(words), (off_t)at);

		if (count <= 0)
			return false; /* the stack's end */
		for (ssize_t i = 0; i < count / (ssize_t)sizeof(*words); i++)
			if (words[i] >= from && words[i] < to)
				return true;
	}
	return false;
}

int threads_inside(uint64_t from, uint64_t to)
{
	int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC), inside = memory < 0;
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *task;

	while (memory >= 0 && tasks && (task = readdir(tasks))) {
		int tid = atoi(task->d_name);

		if (tid > 0 && tid != self_tid() && tid != LOAD(&snapshim_mailbox.thread) && !known(tid) &&
		    is_inside(memory, tid, from, to))
			inside++;
	}
	inside += !tasks;
	if (tasks)
		closedir(tasks);
	if (memory >= 0)
		close(memory);
	return inside;
}
