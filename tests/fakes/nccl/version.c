/* The version that the library reports: FAKE_NCCL_VERSION of the environment, else the one that it was built as. */
#include <stdlib.h>

#include "errors.h"

ncclResult_t ncclGetVersion(int *version)
{
	const char *given = getenv("FAKE_NCCL_VERSION");

	if (!version)
		return failed(ncclInvalidArgument, "nowhere to put the version");
	*version = given && *given ? atoi(given) : FAKE_NCCL_VERSION;
	return ncclSuccess;
}
