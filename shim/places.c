/* Tells whether a thread was interrupted in the middle of the allocator, the loader or the driver, where it may hold their locks.
 *
 * To park it there is no use: the driver would wait for that lock. A thread is outside most of the time, so it is let
 * run on for a moment. This is a guess that saves time, by the code the thread was in; the probe has the last word. A thread
 * that waits in a system call is taken as it is, or all the sleeping ones would be passed over.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <ucontext.h>

#define PLACES_MAX 8

static struct {
	uintptr_t from, to;
} places[PLACES_MAX];
static int places_count;

/* The code of libc, of the loader, of CUDA's driver, and of whatever allocator the program has instead of libc's. */
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

		if (!mapping.executable)
			continue;
		if (contains || strncmp(mapping.name, "libc.so", 7) == 0 || strncmp(mapping.name, "libc-2", 6) == 0 ||
		    strncmp(mapping.name, "ld-linux", 8) == 0 || strncmp(mapping.name, "ld-2", 4) == 0 ||
		    strncmp(mapping.name, "libcuda.so", 10) == 0) {
			places[places_count].from = mapping.from;
			places[places_count++].to = mapping.to;
		}
	}
	maps_close(&maps);
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

bool may_hold_a_lock(const void *context)
{
	const mcontext_t *machine = &((const ucontext_t *)context)->uc_mcontext;
#if defined(__x86_64__)
	uintptr_t at = (uintptr_t)machine->gregs[REG_RIP];
#else
	uintptr_t at = (uintptr_t)machine->pc;
#endif

	for (int i = 0; i < places_count; i++)
		if (at >= places[i].from + sizeof(long) && at < places[i].to - sizeof(long))
			return !waits_in_the_kernel(machine, at);
	return false;
}
