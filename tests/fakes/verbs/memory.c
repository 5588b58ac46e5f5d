/* Protection domains and registered memory. A peer names memory by a key; keys are never used twice in a process. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "fake.h"

struct region {
	struct ibv_mr seen;
	uint64_t iova; /* the peer's name for its first byte */
	struct region *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions;
static uint32_t last_key;

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	if (pd)
		pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *memory, size_t bytes, uint64_t iova, unsigned int access)
{
	struct region *region = calloc(1, sizeof(*region));

	(void)access;
	if (!region)
		return NULL;
	region->seen = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = memory, .length = bytes};
	region->iova = iova;
	pthread_mutex_lock(&lock);
	region->seen.lkey = region->seen.rkey = ++last_key;
	region->next = regions;
	regions = region;
	pthread_mutex_unlock(&lock);
	return &region->seen;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *memory, size_t bytes, int access)
{
	return ibv_reg_mr_iova2(pd, memory, bytes, (uint64_t)(uintptr_t)memory, (unsigned int)access);
}

/* Device memory cannot be registered: NCCL then copies through host memory. */
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access)
{
	(void)pd, (void)offset, (void)bytes, (void)iova, (void)fd, (void)access;
	errno = EOPNOTSUPP;
	return NULL;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	struct region **place;

	pthread_mutex_lock(&lock);
	for (place = &regions; *place && &(*place)->seen != mr; place = &(*place)->next)
		;
	if (*place)
		*place = (*place)->next;
	pthread_mutex_unlock(&lock);
	free(mr);
	return 0;
}

void *memory_by_key(uint32_t key, uint64_t address, size_t bytes)
{
	void *found = NULL;

	pthread_mutex_lock(&lock);
	for (struct region *region = regions; region && !found; region = region->next)
		if (region->seen.rkey == key && address >= region->iova && bytes <= region->seen.length &&
		    address - region->iova <= region->seen.length - bytes)
			found = (char *)region->seen.addr + (address - region->iova);
	pthread_mutex_unlock(&lock);
	return found;
}
