/* What every target has: its entry point, as libFuzzer and replay.c call it, and a reader of the input. */
#ifndef SNAPSHIM_FUZZ_INPUT_H
#define SNAPSHIM_FUZZ_INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

struct input {
	const uint8_t *at;
	size_t left;
};

/* Numbers are zero when the input has ended. */
static inline uint64_t take(struct input *input, unsigned int bytes)
{
	uint64_t number = 0;

	for (; bytes > 0 && input->left > 0; bytes--, input->left--)
		number = number << 8 | *input->at++;
	return number;
}

/* At most `most` bytes, as many as a 16-bit number before them says. */
static inline struct input take_bytes(struct input *input, size_t most)
{
	size_t bytes = take(input, 2);
	struct input part = {input->at, bytes < most ? bytes : most};

	if (part.left > input->left)
		part.left = input->left;
	input->at += part.left;
	input->left -= part.left;
	return part;
}

/* A copy with a zero after it, in memory of exactly that size, so that AddressSanitizer sees what reads beyond it. */
static inline char *text_of(struct input input)
{
	char *text = malloc(input.left + 1);

	if (!text)
		abort();
	if (input.left)
		memcpy(text, input.at, input.left);
	text[input.left] = 0;
	return text;
}

#define EXPECT(condition)                                                                      \
	do                                                                                     \
		if (!(condition)) {                                                            \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
			abort();                                                               \
		}                                                                              \
	while (0)

#endif
