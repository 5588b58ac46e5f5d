/* A program with two threads and some memory, which does to its pages what its input says, and prints "done" after each
 * line:
 *   map NAME PAGES [huge]      maps NAME (a letter); prints its address
 *   write NAME FIRST COUNT VALUE
 *   comb NAME FIRST COUNT VALUE    every other page
 *   zero NAME FIRST COUNT      writes zeros
 *   forget NAME FIRST COUNT    MADV_DONTNEED
 *   read NAME FIRST COUNT      reads one byte of each page
 *   protect NAME FIRST COUNT   PROT_READ, and PROT_READ | PROT_WRITE again
 *   unmap NAME FIRST COUNT
 *   again NAME FIRST COUNT     maps fresh memory at the same place
 *   madvise NAME ADVICE        of the whole of it
 *   lock NAME
 *   sum NAME FIRST COUNT       prints the sum of the first bytes of these pages
 *   fork                       a child that ends with its parent; prints its pid
 *   descriptors                prints how many userfaultfds are open
 *   exec                       executes sleep
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define PAGE 4096

static struct {
	char *start;
	size_t pages;
} known[26];

static void *wait_for_ever(void *argument)
{
	(void)argument;
	for (;;)
		pause();
	return NULL;
}

static int userfaultfds(void)
{
	char target[64];
	DIR *folder = opendir("/proc/self/fd");
	struct dirent *entry;
	int count = 0;

	while ((entry = readdir(folder))) {
		ssize_t bytes = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);

		target[bytes > 0 ? bytes : 0] = 0;
		count += strcmp(target, "anon_inode:[userfaultfd]") == 0;
	}
	closedir(folder);
	return count;
}

static void act(const char *line)
{
	char verb[16] = "", name = 0, word[16] = "";
	size_t first = 0, count = 0;
	int value = 0;
	volatile char *page;
	int fields = sscanf(line, "%15s %c %zu %zu %d", verb, &name, &first, &count, &value);

	sscanf(line, "%*s %*c %*s %15s", word);
	if (strcmp(verb, "fork") == 0) {
		int child = fork();

		if (child == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (;;)
				pause(); /* it must not read the parent's input */
		}
		printf("%d\n", child);
		return;
	}
	if (strcmp(verb, "descriptors") == 0) {
		printf("%d\n", userfaultfds());
		return;
	}
	if (strcmp(verb, "exec") == 0)
		execlp("sleep", "sleep", "1000", NULL);
	if (fields < 2 || name < 'a' || name > 'z')
		exit(2);
	if (strcmp(verb, "map") == 0) {
		size_t bytes = first * PAGE;
		char *start = mmap(NULL, bytes + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		start += (2 << 20) - (size_t)start % (2 << 20);
		mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		madvise(start, bytes, strcmp(word, "huge") == 0 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
		known[name - 'a'].start = start;
		known[name - 'a'].pages = first;
		printf("%zu\n", (size_t)start);
		return;
	}
	page = known[name - 'a'].start + first * PAGE;
	if (strcmp(verb, "write") == 0)
		for (size_t i = 0; i < count; i++)
			memset((char *)page + i * PAGE, value, PAGE);
	else if (strcmp(verb, "comb") == 0)
		for (size_t i = 0; i < count; i += 2)
			memset((char *)page + i * PAGE, value, PAGE);
	else if (strcmp(verb, "zero") == 0)
		memset((char *)page, 0, count * PAGE);
	else if (strcmp(verb, "read") == 0)
		for (size_t i = 0; i < count; i++)
			value += page[i * PAGE];
	else if (strcmp(verb, "forget") == 0)
		madvise((char *)page, count * PAGE, MADV_DONTNEED);
	else if (strcmp(verb, "protect") == 0) {
		mprotect((char *)page, count * PAGE, PROT_READ);
		mprotect((char *)page, count * PAGE, PROT_READ | PROT_WRITE);
	} else if (strcmp(verb, "unmap") == 0)
		munmap((char *)page, count * PAGE);
	else if (strcmp(verb, "again") == 0)
		mmap((char *)page, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	else if (strcmp(verb, "madvise") == 0)
		madvise(known[name - 'a'].start, known[name - 'a'].pages * PAGE, (int)first);
	else if (strcmp(verb, "lock") == 0)
		mlock(known[name - 'a'].start, known[name - 'a'].pages * PAGE);
	else if (strcmp(verb, "sum") == 0) {
		long sum = 0;

		for (size_t i = 0; i < count; i++)
			sum += page[i * PAGE];
		printf("%ld\n", sum);
		return;
	} else
		exit(2);
	puts("done");
}

int main(void)
{
	char line[256];
	pthread_t thread;

	pthread_create(&thread, NULL, wait_for_ever, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof(line), stdin))
		act(line);
	return 0;
}
