/* The connection to one other rank, and moving a set of blocks over many of them at once. */
#ifndef FAKE_NCCL_LINKS_H
#define FAKE_NCCL_LINKS_H

#include "ib.h"
#include "network.h"

enum opcode {
	OP_ALLREDUCE,
	OP_BROADCAST,
	OP_REDUCE,
	OP_ALLGATHER,
	OP_REDUCESCATTER,
	OP_ALLTOALL,
	OP_GATHER,
	OP_SCATTER,
	OP_SEND,
	OP_RECV,
	OP_FINALIZE,
	OP_SPLIT,
	OP_SHRINK,
	OPCODES
};

const char *opcode_name(enum opcode opcode);

/* What two ranks must agree on before a block travels between them. */
struct signature {
	uint32_t opcode;
	uint32_t datatype;
	uint32_t reduction;
	int32_t root;
	uint64_t count;
};

enum frame_type { FRAME_READY = 1, FRAME_DATA = 2, FRAME_REFUSED = 3 };

struct frame {
	uint32_t magic;
	uint32_t type;
	struct signature signature;
	uint64_t bytes;
};

/* One block to or from one peer. The caller sets the first part; the rest belongs to links.c. */
struct transfer {
	int peer;
	bool sending;
	struct signature signature;
	void *data;
	size_t bytes;

	struct transfer *next_of_kind; /* sends, or receives, of the same link in their order */
	struct transfer *next_out;
	bool done;
};

struct link {
	int fd; /* -1: none */
	struct ib_stream *stream; /* NULL: the data goes through the socket itself */
	struct frame in;
	size_t in_have;
	struct transfer *in_into; /* the receive whose payload is arriving */
	size_t in_payload;
	struct frame *early; /* READY frames of the peer that have no matching send yet */
	size_t nearly, early_room;

	/* For the run under way. */
	struct transfer *sends, *receives;   /* not yet matched */
	struct transfer *out_head, *out_tail; /* frames to write */
	struct frame out;
	size_t out_done;
	bool out_begun;
	size_t unfinished;
};

/* Runs all transfers concurrently and returns when all are done. A peer gets its data only after it has requested it
 * with an equal signature, so nothing completes before both ranks have launched it. With `leaving`, a peer that is gone
 * counts as done. After an error the links can only be closed. */
ncclResult_t links_run(struct link *links, int nlinks, struct transfer *transfers, size_t count, bool leaving,
		       const struct cancel *cancel);
/* `drain`: what was sent must have arrived; a socket takes care of that by itself. */
void links_close(struct link *links, int nlinks, bool drain);

#endif
