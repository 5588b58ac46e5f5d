/* The RDMA devices of this copy of the library, as in NCCL's net plugin for InfiniBand: all are opened with the first
 * communicator and never closed, and each has a detached thread that waits for its events until that fails.
 */
#define _GNU_SOURCE
#include "ib.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "errors.h"
#include "faults.h"

#define DEVICES_MAX 32

struct ib_functions ib;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ibv_context *contexts[DEVICES_MAX];
static int count = -1, next; /* -1: not opened yet */

bool ib_wanted(void)
{
	const char *net = getenv("FAKE_NCCL_NET");

	return net && !strcmp(net, "IB");
}

static void *watch(void *context)
{
	struct ibv_async_event event;

	while (ib.ibv_get_async_event(context, &event) == 0)
		ib.ibv_ack_async_event(&event);
	fault_at("ibevent", 0, NULL);
	return NULL;
}

static ncclResult_t load(void)
{
	void *library = dlopen("libibverbs.so", RTLD_NOW);

	if (!library)
		library = dlopen("libibverbs.so.1", RTLD_NOW);
	if (!library)
		return failed(ncclSystemError, "%s", dlerror());
#define FIND(name, version)                                                           \
	ib.name = (__typeof__(ib.name))dlvsym(library, #name, version);               \
	if (!ib.name)                                                                 \
		return failed(ncclSystemError, "libibverbs has no %s@%s", #name, version);
#define X(name) FIND(name, "IBVERBS_1.1")
	IB_FUNCTIONS(X)
#undef X
	FIND(ibv_create_comp_channel, "IBVERBS_1.0")
	FIND(ibv_destroy_comp_channel, "IBVERBS_1.0")
	return ncclSuccess;
}

static ncclResult_t open_all(void)
{
	ncclResult_t result = load();
	struct ibv_device **list;

	if (result != ncclSuccess)
		return result;
	count = 0;
	list = ib.ibv_get_device_list(NULL);
	for (int i = 0; list && list[i] && count < DEVICES_MAX; i++) {
		struct ibv_context *context = ib.ibv_open_device(list[i]);
		pthread_t thread;

		if (!context)
			continue;
		contexts[count++] = context;
		if (pthread_create(&thread, NULL, watch, context) == 0)
			pthread_detach(thread);
	}
	ib.ibv_free_device_list(list);
	return ncclSuccess;
}

ncclResult_t ib_next_device(struct ibv_context **context)
{
	ncclResult_t result = ncclSuccess;

	pthread_mutex_lock(&lock);
	if (count < 0)
		result = open_all();
	if (result == ncclSuccess && count < 1)
		result = failed(ncclSystemError, "there is no RDMA device");
	if (result == ncclSuccess)
		*context = contexts[next++ % count];
	pthread_mutex_unlock(&lock);
	return result;
}
