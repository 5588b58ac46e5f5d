/* RDMA devices that the process has open through libibverbs, and which library opened each. */
#ifndef SNAPSHIM_NCCL_RDMA_H
#define SNAPSHIM_NCCL_RDMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "command.h"

#define RDMA_CONTEXTS_MAX 128
#define RDMA_THREADS_MAX 4 /* that wait for the events of one context: NCCL has one for each port that it uses */

/* An open device. Entries are used again; the functions that change or read them hold the lock of NCCL's tables. */
struct rdma_context {
	void *context; /* libibverbs' own; NULL: unused */
	char device[64];
	char owner[256]; /* the path of the library that opened it */
	struct nccl_instance *instance; /* the NCCL that opened it; NULL: it is another library's */
	int commands, events; /* its descriptors */
	uint32_t reading, ending;
	int threads[RDMA_THREADS_MAX]; /* that wait for its events */
};

/* The entry with this number, from 0 on; NULL at the end. Unused ones are included. */
struct rdma_context *rdma_at(size_t number);
/* libibverbs' ibv_close_device, and forgets the entry. 0 or an errno. */
int rdma_close(struct rdma_context *entry);
/* The part of a path after its last slash. */
const char *rdma_library(const struct rdma_context *entry);

/* rdma_release.c: closes the devices of every NCCL instance of this process, none of which may be used from then on. */
int rdma_release(struct nccl_job *job);

#endif
