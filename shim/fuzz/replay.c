/* Runs a target without libFuzzer: the kept inputs, then mutations of them.
 *
 *   replay-TARGET SEED MUTATIONS FILE…
 *
 * Ends with an error of a sanitizer or of the target itself, and then prints the input as hexadecimal digits.
 */
#include <sanitizer/common_interface_defs.h>
#include <signal.h>

#include "input.h"

#define MOST_BYTES 4096

static uint8_t current[MOST_BYTES];
static size_t current_bytes;
static uint64_t state;

static void show(void)
{
	fprintf(stderr, "input: ");
	for (size_t i = 0; i < current_bytes; i++)
		fprintf(stderr, "%02x", current[i]);
	fprintf(stderr, "\n");
}

static uint64_t chance(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return below ? state % below : 0;
}

static void mutate(void)
{
	static const uint8_t odd[] = {0, 1, 0x7f, 0x80, 0xff, '\n', ' ', ':', ',', '/', '.', '-', '0', ')'};
	size_t at = (size_t)chance(current_bytes + 1), many = 1 + (size_t)chance(8);

	switch (chance(5)) {
	case 0:
		if (at < current_bytes)
			current[at] = (uint8_t)chance(256);
		break;
	case 1:
		if (at < current_bytes)
			current[at] = odd[chance(sizeof(odd))];
		break;
	case 2: /* removes some */
		if (many > current_bytes - at)
			many = current_bytes - at;
		memmove(current + at, current + at + many, current_bytes - at - many);
		current_bytes -= many;
		break;
	case 3: /* repeats some */
		if (many > current_bytes - at)
			many = current_bytes - at;
		if (current_bytes + many > MOST_BYTES)
			break;
		memmove(current + at + many, current + at, current_bytes - at);
		current_bytes += many;
		break;
	default: /* adds one */
		if (current_bytes == MOST_BYTES)
			break;
		memmove(current + at + 1, current + at, current_bytes - at);
		current[at] = odd[chance(sizeof(odd))];
		current_bytes++;
	}
}

/* From memory of exactly that size, so that AddressSanitizer sees what reads beyond it. */
static void run(void)
{
	uint8_t *exact = malloc(current_bytes ? current_bytes : 1);

	if (!exact)
		abort();
	memcpy(exact, current, current_bytes);
	LLVMFuzzerTestOneInput(exact, current_bytes);
	free(exact);
}

static void load(const char *path)
{
	FILE *file = fopen(path, "rb");

	if (!file) {
		perror(path);
		exit(2);
	}
	current_bytes = fread(current, 1, sizeof(current), file);
	fclose(file);
}

static void on_abort(int number)
{
	show();
	signal(number, SIG_DFL);
	raise(number);
}

int main(int count, char **arguments)
{
	long mutations;

	if (count < 4) {
		fprintf(stderr, "usage: %s SEED MUTATIONS FILE…\n", arguments[0]);
		return 2;
	}
	state = strtoull(arguments[1], NULL, 10) * 2654435761u + 1;
	mutations = strtol(arguments[2], NULL, 10);
	__sanitizer_set_death_callback(show);
	signal(SIGABRT, on_abort);
	run();
	for (int i = 3; i < count; i++) {
		load(arguments[i]);
		run();
	}
	for (long i = 0; i < mutations; i++) {
		load(arguments[3 + (int)chance((uint64_t)count - 3)]);
		for (uint64_t times = 1 + chance(6); times > 0; times--)
			mutate();
		run();
	}
	return 0;
}
