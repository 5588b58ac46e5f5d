/* Decides whether a thread was interrupted inside the allocator, the loader or the driver, where it may hold their locks.
 *
 * Parking it there is useless: the next call into the driver would wait for that lock. A thread is outside most of the
 * time, so it may run a moment longer. Judging by the code that the thread was in is a heuristic that saves time; the probe
 * decides, and so does the rehearsal if device memory is offloaded. A thread that waits in a system call is parked,
 * because otherwise no sleeping thread could be. The exception is a thread that sleeps inside the driver, where it waits
 * for the GPU and may hold any lock.
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

#define PLACES_MAX 4096
#define STACK_WORDS 128 /* enough for libc's frames and a few of its callers' */
#if defined(__aarch64__)
#define ADDRESS_BITS (((uintptr_t)1 << 48) - 1) /* a return address may be signed above them */
#else
#define ADDRESS_BITS (~(uintptr_t)0)
#endif

enum owner {
	OTHERS,
	OURS,
	ALLOCATOR, /* in a program's own code */
	LIBC,    /* and other code in which the driver sleeps, allocates, or reads the time while it waits for a GPU */
	DRIVER,
};

/* All executable mappings, by address. */
static struct {
	uintptr_t from, to;
	enum owner owner;
} places[PLACES_MAX];
static int places_count;

static enum owner owner_of(const struct mapping *mapping, uintptr_t allocator)
{
	/* The driver's compiler is a separate library. */
	static const struct {
		const char *begins;
		enum owner owner;
	} known[] = {{"libcuda.so", DRIVER}, {"libnvidia-", DRIVER}, {"libc.so", LIBC},     {"libc-2", LIBC},
		     {"ld-linux", LIBC},     {"ld-2", LIBC},         {"libpthread", LIBC},  {"[vdso]", LIBC},
		     {"libjemalloc", LIBC},  {"libtcmalloc", LIBC},  {"libmimalloc", LIBC}, {"libsnapshim", OURS}};

	for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
		if (strncmp(mapping->name, known[i].begins, strlen(known[i].begins)) == 0)
			return known[i].owner;
	return allocator >= mapping->from && allocator < mapping->to ? ALLOCATOR : OTHERS;
}

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
	while (places_count < PLACES_MAX && maps_next(&maps, &mapping))
		if (mapping.executable) {
			places[places_count].from = mapping.from;
			places[places_count].to = mapping.to;
			places[places_count++].owner = owner_of(&mapping, (uintptr_t)allocator);
		}
	maps_close(&maps);
}

/* Our syscall() counts as libc's. */
#define SECTION_END __attribute__((visibility("hidden")))
extern const char __start_snapshim_syscall[] SECTION_END, __stop_snapshim_syscall[] SECTION_END;

/* The owner of the code at an address. If there is no code, OTHERS, and `code` is false. An address next to the end of a
 * mapping does not count, because the bytes around it are read. */
static enum owner owner_at(uintptr_t at, bool *code)
{
	int low = 0, high = places_count;

	while (low < high) {
		int middle = (low + high) / 2;

		if (places[middle].to <= at)
			low = middle + 1;
		else
			high = middle;
	}
	*code = low < places_count && at >= places[low].from + sizeof(long) && at < places[low].to - sizeof(long);
	if (at >= (uintptr_t)__start_snapshim_syscall && at < (uintptr_t)__stop_snapshim_syscall)
		return LIBC;
	return *code ? places[low].owner : OTHERS;
}

/* Interrupted in a system call: the kernel has reset the thread to the instruction, or makes the call return EINTR. */
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

/* Whether the driver called the code that runs in libc: the first return address outside libc decides, from the link
 * register (on machines that have one) and the stack. The stack is read through the kernel, because it may end sooner. */
static bool called_by_the_driver(uintptr_t link, uintptr_t stack)
{
	uintptr_t words[1 + STACK_WORDS] = {link};
	struct iovec here = {words + 1, STACK_WORDS * sizeof(words[0])},
		     there = {(void *)stack, STACK_WORDS * sizeof(words[0])};
	long bytes = KERNEL(SYS_process_vm_readv, self_tid(), &here, 1, &there, 1, 0);

	for (long i = 0; i < 1 + (bytes > 0 ? bytes / (long)sizeof(words[0]) : 0); i++) {
		bool code;
		enum owner owner = owner_at(words[i] & ADDRESS_BITS, &code);

		if (code && owner != LIBC && owner != OURS)
			return owner == DRIVER;
	}
	return false;
}

enum place place_in(const void *context)
{
	const mcontext_t *machine = &((const ucontext_t *)context)->uc_mcontext;
#if defined(__x86_64__)
	uintptr_t at = (uintptr_t)machine->gregs[REG_RIP], link = 0, stack = (uintptr_t)machine->gregs[REG_RSP];
#else
	uintptr_t at = (uintptr_t)machine->pc, link = (uintptr_t)machine->regs[30], stack = (uintptr_t)machine->sp;
#endif
	bool code, waits;
	enum owner owner = owner_at(at, &code);

	if (owner == OTHERS || owner == OURS)
		return PLACE_FREE;
	waits = waits_in_the_kernel(machine, at);
	if (owner == DRIVER || (owner == LIBC && called_by_the_driver(link, stack)))
		return waits ? PLACE_DRIVER_SLEEPS : PLACE_DRIVER;
	return waits ? PLACE_FREE : PLACE_DOUBTFUL;
}
