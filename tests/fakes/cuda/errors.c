/* The errors by number and by name. */
#include "cuda_abi.h"

#include <stdlib.h>
#include <string.h>

static const struct {
	int number;
	const char *name;
	const char *text;
} errors[] = {
#define AS_ROW(number, name, text) {number, #name, text},
	CUDA_ERRORS(AS_ROW)};

#define COUNT (sizeof errors / sizeof *errors)

const char *error_name(int number)
{
	for (size_t i = 0; i < COUNT; i++)
		if (errors[i].number == number)
			return errors[i].name;
	return NULL;
}

const char *error_text(int number)
{
	for (size_t i = 0; i < COUNT; i++)
		if (errors[i].number == number)
			return errors[i].text;
	return NULL;
}

int error_number(const char *name)
{
	if (*name >= '0' && *name <= '9')
		return atoi(name);
	for (size_t i = 0; i < COUNT; i++)
		if (strcmp(errors[i].name, name) == 0)
			return errors[i].number;
	return CUDA_ERROR_UNKNOWN;
}
