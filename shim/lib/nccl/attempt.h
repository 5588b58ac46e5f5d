/* One attempt to attach: the communicators of a request that are detached here, in the request's order. */
#ifndef SNAPSHIM_NCCL_ATTEMPT_H
#define SNAPSHIM_NCCL_ATTEMPT_H

#include "command.h"
#include "communicators.h"

struct member {
	struct nccl_comm *comm;
	ncclUniqueId id;
	bool to_be_tried, entered;
	_Atomic(ncclComm_t) fresh; /* where NCCL writes the new communicator; the record gets it when all have succeeded */
	/* The thread that may abort the new communicator: the worker or, while the worker is inside a call that may never
	 * return, the thread that cancels. CANCELLED: it is aborted, and the worker must not use it any more. */
	_Atomic int holder;
};

enum { WORKER = 0, INSIDE_A_CALL = 1, CANCELLED = 2 };

struct attempt {
	_Atomic int holders;
	size_t count;
	struct member members[];
};

/* Parses lines "ID UNIQUE-ID-IN-HEX try" or "… untried", and sets their communicators to ATTACHING. NULL: the job has
 * failed. */
struct attempt *attempt_begin(struct nccl_job *job);
void attempt_let_go(struct attempt *attempt);

#endif
