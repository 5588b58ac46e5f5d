/* Tells whether a thread was interrupted in the middle of the allocator, the loader or the driver, where it may hold their locks.
 *
 * To park it there is no use: whoever calls the driver next would wait for that lock. A thread is outside most of the time, so
 * it is let run on for a moment. By the code the thread was in this is a guess that saves time; the probe, and where device
 * memory is parked its rehearsal, have the last word. A thread that waits in a system call is taken as it is, or all the
 * sleeping ones would be passed over; not so quickly if the driver seems to have made the call.
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

#define PLACES_MAX 8
/* Of the stack of a thread that sleeps: what the driver's own frames take, and few of its caller's. */
#define STACK_BYTES 8192
#define PIECE_WORDS 64

static struct {
	uintptr_t from, to;
	bool driver;
} places[PLACES_MAX];
static int places_count;

/* The code of libc, of the loader, of CUDA's driver, of what it asks for the time while it waits for a GPU, and of whatever
 * allocator the program has instead of libc's. */
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
		    strcmp(mapping.name, "[vdso]") == 0) {
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

/* Whether an address of the driver's is among the newest words of the stack. One that an earlier call left there counts as
 * well. Through the kernel: the stack may end sooner. */
static bool called_by_the_driver(uintptr_t stack)
{
	uintptr_t words[PIECE_WORDS];

	for (uintptr_t from = stack; from < stack + STACK_BYTES; from += sizeof(words)) {
		struct iovec here = {words, sizeof(words)}, there = {(void *)from, sizeof(words)};
		long bytes = KERNEL(SYS_process_vm_readv, self_pid(), &here, 1, &there, 1, 0);

		for (size_t i = 0; bytes > 0 && i < (size_t)bytes / sizeof(words[0]); i++) {
			int place = place_of(words[i]);

			if (place >= 0 && places[place].driver)
				return true;
		}
		if (bytes != (long)sizeof(words))
			break;
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
	if (waits_in_the_kernel(machine, at))
		return called_by_the_driver(stack) ? PLACE_DOUBTFUL : PLACE_FREE;
	return places[place].driver || called_by_the_driver(stack) ? PLACE_DRIVER : PLACE_DOUBTFUL;
}
