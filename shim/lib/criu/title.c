/* Preloaded into criu, with limits.c or files.c: criu is executed by a descriptor, whose number would be its name. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/prctl.h>

__attribute__((constructor)) static void set_title(void)
{
	static char name[] = "criu";

	program_invocation_short_name = name; /* the title that criu gives itself begins with it */
	prctl(PR_SET_NAME, name);
}
