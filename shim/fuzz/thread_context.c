/* The registers and the stack of a thread of the job, which hold anything when the reserved signal interrupts it:
 * core/thread_location.c. Must not crash, whatever they are. */
#define _GNU_SOURCE
#include <ucontext.h>

#include "core/thread_location.c"
#include "input.h"

__attribute__((section("snapshim_syscall"))) void in_section(void);
void in_section(void)
{
}

/* An address: any number, or one near an edge of a mapping with code, of the stack or of the heap. */
static uintptr_t address(struct input *input)
{
	static char heap[64];
	unsigned int kind = (unsigned int)take(input, 1);
	uintptr_t offset = (uintptr_t)take(input, 2);

	switch (kind % 6) {
	case 0:
		return (uintptr_t)take(input, 8);
	case 1:
		return places_count ? places[kind % (unsigned int)places_count].from + offset : 0;
	case 2:
		return places_count ? places[kind % (unsigned int)places_count].to - offset % 64 : 0;
	case 3:
		return (uintptr_t)&offset + offset;
	case 4:
		return (uintptr_t)heap + offset;
	default:
		return places_count ? places[offset % (unsigned int)places_count].from + kind : 0;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct input input = {data, bytes};
	ucontext_t context;
	uintptr_t stack[STACK_WORDS];

	if (!places_count)
		places_find();
	/* Any mapping may be the driver's, except for the kernel's own page, which is not readable. */
	for (int i = 0; i < places_count; i++)
		if (places[i].from < (uintptr_t)1 << 63)
			places[i].owner = (enum owner)(take(&input, 1) % (DRIVER + 1));
	for (unsigned int i = 0; i < STACK_WORDS; i++)
		stack[i] = i < 4 ? address(&input) : 0;
	memset(&context, 0, sizeof(context));
#if defined(__x86_64__)
	context.uc_mcontext.gregs[REG_RIP] = (greg_t)address(&input);
	context.uc_mcontext.gregs[REG_RSP] = (greg_t)(take(&input, 1) % 2 ? (uintptr_t)stack : address(&input));
	context.uc_mcontext.gregs[REG_RAX] = (greg_t)take(&input, 1) - 128;
#else
	context.uc_mcontext.pc = address(&input);
	context.uc_mcontext.regs[30] = address(&input);
	context.uc_mcontext.sp = take(&input, 1) % 2 ? (uintptr_t)stack : address(&input);
	context.uc_mcontext.regs[0] = take(&input, 1) - 128;
#endif
	EXPECT(place_in(&context) <= PLACE_DRIVER_SLEEPS);
	return 0;
}
