/* The mailbox: the memory through which the daemon and this library exchange commands and answers (abi.h), and its error
 * text. */
#include "shim.h"

#include <stddef.h>

struct snapshim_mailbox snapshim_mailbox = {
	.magic = {'S', 'N', 'A', 'P', 'S', 'H', 'I', 'M'},
	.abi = SNAPSHIM_ABI_VERSION,
	.size = sizeof(struct snapshim_mailbox),
};

void add_text(const char *text)
{
	char *into = snapshim_mailbox.text;
	size_t at = 0;

	while (at < sizeof(snapshim_mailbox.text) - 1 && into[at])
		at++;
	while (at < sizeof(snapshim_mailbox.text) - 1 && *text)
		into[at++] = *text++;
	into[at] = 0;
}

void add_number(long number)
{
	char digits[24];
	int at = sizeof(digits);
	unsigned long rest = number < 0 ? -(unsigned long)number : (unsigned long)number;

	digits[--at] = 0;
	do
		digits[--at] = (char)('0' + rest % 10);
	while (rest /= 10);
	if (number < 0)
		digits[--at] = '-';
	add_text(digits + at);
}
