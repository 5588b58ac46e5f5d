/* Tells whether a thread was interrupted in the middle of the allocator, the loader or the driver, where it may hold their locks.
 *
 * To park it there is no use: whoever calls the driver next would wait for that lock. A thread is outside most of the time, so
 * it is let run on for a moment. By the code the thread was in this is a guess that saves time; the probe, and where device
 * memory is parked its rehearsal, have the last word. A thread that waits in a system call is taken as it is, or all the
 * sleeping ones would be passed over; not if it sleeps in the driver, where it waits for the GPU and may hold what it likes.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>

#define PLACES_MAX 12
#define STACK_WORDS 128 /* what libc takes, and few of its callers: a word of theirs may be left from an earlier call */

static struct {
	uintptr_t from, to;
	bool driver;
} places[PLACES_MAX];
static int places_count;

/* The code of CUDA's driver, and all that it sleeps in or asks for the time while it waits for a GPU; of the loader; and of
 * whatever allocator the program has instead of libc's. */
void places_find(void)
{
	static void *allocator;
	struct maps maps;
	struct mapping mapping;

	if (!allocator)
		allocator = dlsym(RTLD_DEFAULT, "malloc");
	places_count = 0;
	if (!maps_open(&maps))
		return;
	while (places_count < PLACES_MAX && maps_next(&maps, &mapping)) {
		bool contains = (uintptr_t)allocator >= mapping.from && (uintptr_t)allocator < mapping.to;
		bool driver = strncmp(mapping.name, "libcuda.so", 10) == 0;

		if (!mapping.executable)
			continue;
		if (contains || driver || strncmp(mapping.name, "libc.so", 7) == 0 || strncmp(mapping.name, "libc-2", 6) == 0 ||
		    strncmp(mapping.name, "ld-linux", 8) == 0 || strncmp(mapping.name, "ld-2", 4) == 0 ||
		    strncmp(mapping.name, "libsnapshim", 11) == 0 || strcmp(mapping.name, "[vdso]") == 0) {
			places[places_count].from = mapping.from;
			places[places_count].to = mapping.to;
			places[places_count++].driver = driver;
		}
	}
	maps_close(&maps);
}

static int place_of(uintptr_t at)
{
	for (int i = 0; i < places_count; i++)
		if (at >= places[i].from + sizeof(long) && at < places[i].to - sizeof(long))
			return i;
	return -1;
}

/* Interrupted in a system call: the kernel has set it back to the instruction, or lets it return EINTR. */
static bool waits_in_the_kernel(const mcontext_t *machine, uintptr_t at)
{
#if defined(__x86_64__)
	static const unsigned char instruction[] = {0x0f, 0x05};
	long result = machine->gregs[REG_RAX];
#else
	static const unsigned char instruction[] = {0x01, 0x00, 0x00, 0xd4};
	long result = (long)machine->regs[0];
#endif

	return memcmp((const void *)at, instruction, sizeof(instruction)) == 0 ||
	       (result == -EINTR && memcmp((const void *)(at - sizeof(instruction)), instruction, sizeof(instruction)) == 0);
}

/* Whether the driver is among the callers, by an address of its code in the newest words of the stack. Through the kernel: the
 * stack may end sooner. */
static bool called_by_the_driver(uintptr_t stack)
{
	uintptr_t words[STACK_WORDS];
	struct iovec here = {words, sizeof(words)}, there = {(void *)stack, sizeof(words)};
	long bytes = KERNEL(SYS_process_vm_readv, self_pid(), &here, 1, &there, 1, 0);

	for (long i = 0; i < bytes / (long)sizeof(words[0]); i++) {
		int place = place_of(words[i]);

		if (place >= 0 && places[place].driver)
			return true;
	}
	return false;
}

enum place place_in(const void *context)
{
	const mcontext_t *machine = &((const ucontext_t *)context)->uc_mcontext;
#if defined(__x86_64__)
	uintptr_t at = (uintptr_t)machine->gregs[REG_RIP], stack = (uintptr_t)machine->gregs[REG_RSP];
#else
	uintptr_t at = (uintptr_t)machine->pc, stack = (uintptr_t)machine->sp;
#endif
	int place = place_of(at);

	if (place < 0)
		return PLACE_FREE;
	if (places[place].driver || called_by_the_driver(stack))
		return waits_in_the_kernel(machine, at) ? PLACE_DRIVER_SLEEPS : PLACE_DRIVER;
	return waits_in_the_kernel(machine, at) ? PLACE_FREE : PLACE_DOUBTFUL;
}
