/* For programs whose main() does all the checking. */
#ifndef SNAPSHIM_CHECKS_EXPECT_H
#define SNAPSHIM_CHECKS_EXPECT_H

#include <stdio.h>

#define EXPECT(condition)                                                                   \
	do {                                                                                \
		if (!(condition)) {                                                         \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
			return 1;                                                           \
		}                                                                           \
	} while (0)

#endif
