/* Requests from other processes to this process's driver threads, through this process's memory.
 *
 * The caller finds the mailbox by its magic, at the start of a page in the writable mapping of libcuda.so.1
 * (/proc/PID/maps), and reads and writes it through /proc/PID/mem. So nothing has to be closed before a dump, pid and
 * mount namespaces do not matter, and the caller finds a process that CRIU has restored. The driver threads serve
 * requests in order and completely: a stopped process does not answer, and a request of a killed caller is finished.
 */
#ifndef FAKE_CUDA_MAILBOX_H
#define FAKE_CUDA_MAILBOX_H

#include <stdatomic.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "node.h"

#define MAILBOX_MAGIC "stand-in/cuda/1" /* 16 bytes with its end */
#define MAILBOX_ALIGNMENT 4096
#define MAX_REQUESTS 16

enum request_phase { REQUEST_FREE, REQUEST_ASKED, REQUEST_ANSWERED };
enum command { COMMAND_STATE, COMMAND_LOCK, COMMAND_CHECKPOINT, COMMAND_RESTORE, COMMAND_UNLOCK, COMMAND_LOSE };

struct request {
	uint32_t command;
	uint32_t timeout_ms; /* of a lock, 0: none */
	uint32_t delay_ms;   /* of a fault */
	int32_t result;      /* a CUresult */
	int32_t value;      /* state */
	uint32_t pair_count;
	CUcheckpointGpuPair pairs[MAX_GPUS];
	struct node node; /* of a restore: the GPUs of the caller's node, where the process is now */
};

struct mailbox {
	char magic[16];
	uint32_t bytes; /* of this struct: a caller of another build detects the difference */
	_Atomic int32_t owner; /* the initialised process, in its own pid namespace; 0: no cuInit yet */
	_Atomic int32_t restore_thread;
	_Atomic uint32_t phases[MAX_REQUESTS];
	_Atomic uint64_t orders[MAX_REQUESTS];
	struct request requests[MAX_REQUESTS];
};

extern struct mailbox fake_cuda_mailbox;

#endif
