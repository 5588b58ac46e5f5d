/* One attempt to attach: the communicators of a request that are detached here, in the request's order. */
#ifndef SNAPSHIM_NCCL_ATTEMPT_H
#define SNAPSHIM_NCCL_ATTEMPT_H

#include "command.h"
#include "communicators.h"

struct member {
	struct nccl_comm *comm;
	ncclUniqueId id;
	bool to_be_tried, entered;
	ncclComm_t made; /* where NCCL writes the new communicator: the worker's own */
	_Atomic(ncclComm_t) fresh; /* the same, for the thread that cancels; the record gets it when all have succeeded */
	/* The thread that frees the new communicator if the attempt fails: the worker, unless the thread that cancels found it
	 * inside a call that may never return. CANCELLED: the abort flag is raised, so that the call returns. LEFT: it has
	 * returned, the worker does not touch the communicator any more, and the thread that cancels frees it. */
	_Atomic int holder;
};

enum { WORKER = 0, INSIDE_A_CALL = 1, CANCELLED = 2, LEFT = 3 };

struct attempt {
	_Atomic int holders;
	uint64_t job; /* its number */
	size_t count;
	struct member members[];
};

/* Parses lines "ID UNIQUE-ID-IN-HEX try" or "… untried", and sets their communicators to ATTACHING. NULL: the job has
 * failed. */
struct attempt *attempt_begin(struct nccl_job *job);
void attempt_let_go(struct attempt *attempt);

#endif
