/* The GPUs of a node, from its gpus.json. */
#ifndef FAKE_CUDA_NODE_H
#define FAKE_CUDA_NODE_H

#include <stdbool.h>
#include <stdint.h>

#define MAX_GPUS 16
#define PATH_BYTES 512

struct gpu {
	uint8_t uuid[16];
	char name[64];
	uint64_t memory_bytes;
	int minor;
	int mig; /* 0 off, 1 on, -1 the chip has none */
	int mps; /* 1: its processes are clients of an MPS server */
	int virtual_memory; /* 0: it has none of the virtual-memory calls */
	int capability_major;
	int capability_minor;
	int lost; /* 1: it has fallen off the bus */
	/* Counters of its health. */
	unsigned long long ecc_corrected, ecc_uncorrected;
	unsigned int remapped_corrected, remapped_uncorrected, remap_pending, remap_failed;
	unsigned int temperature_c;
	unsigned long long slow_reasons; /* NVML's bits */
	unsigned int pcie_replays, pcie_width;
	unsigned int nvlinks, nvlinks_down; /* how many it has, and a bit for each that is down */
	unsigned long long nvlink_errors;   /* of the first link */
};

struct node {
	char folder[PATH_BYTES]; /* of the ledger of device memory: where the file is, or "ledger_dir" */
	char driver_version[32];
	int cuda_version; /* 13000 is 13.0 */
	int no_peers; /* 1: no GPU can use the memory of another one */
	uint64_t context_bytes; /* memory of a context on its GPU, in addition to the program's allocations */
	uint32_t gpu_count;
	struct gpu gpus[MAX_GPUS];
};

/* Reads FAKE_GPU_FILE, or gpus.json beside this library. False: it does not exist or cannot be parsed. */
bool node_read(struct node *node);
int node_find(const struct node *node, const uint8_t uuid[16]); /* its index, -1: not of this node */
int node_driver_branch(const struct node *node);  /* 580 of "580.159.04" */
void node_beside(const char *variable, const char *name, char path[PATH_BYTES]);
bool uuid_parse(const char *text, uint8_t uuid[16]); /* with or without "GPU-" */
void uuid_print(const uint8_t uuid[16], char text[48]);

#endif
