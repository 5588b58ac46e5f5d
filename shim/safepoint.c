#include "shim.h"
#include <errno.h>
int empty_cache(int64_t timeout_ns)
{
	(void)timeout_ns;
	return ENOSYS;
}
void safepoint_forget(void)
{
}
