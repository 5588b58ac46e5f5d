/* A library other than NCCL that uses RDMA: opens the first device and keeps it. */
#include "verbs_abi.h"

FAKE_EXPORT int foreign_open(void);
FAKE_EXPORT int foreign_close(void);

static struct ibv_context *context;

int foreign_open(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	ibv_free_device_list(list);
	return context ? 0 : -1;
}

int foreign_close(void)
{
	int failed = context ? ibv_close_device(context) : -1;

	context = NULL;
	return failed;
}
