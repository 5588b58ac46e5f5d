/* The messages between the creator of a unique id and the ranks that join. */
#ifndef FAKE_NCCL_RENDEZVOUS_H
#define FAKE_NCCL_RENDEZVOUS_H

#include "communicator.h"

#define RENDEZVOUS_MAGIC 0x6e636964u
#define RELEASE (-1) /* in place of a rank: the id is not needed */

struct unique_id { /* inside ncclUniqueId */
	uint32_t magic;
	uint32_t version;
	uint64_t number;
	uint64_t padding;
	unsigned char address[NCCL_UNIQUE_ID_BYTES - 24];
};
_Static_assert(sizeof(struct unique_id) == NCCL_UNIQUE_ID_BYTES, "an id is 128 bytes");
_Static_assert(sizeof(((struct unique_id *)0)->address) >= 28, "an IPv6 address fits");

struct join {
	uint32_t magic;
	int32_t rank, nranks;
	uint32_t padding;
	uint64_t number;
	struct member self;
};

struct reply {
	uint32_t magic;
	int32_t refused; /* 0, or the number of ranks that the others have given; -1: the rank is taken or does not exist */
};

uint64_t rendezvous_number(const ncclUniqueId *id);
/* Ends this process's listener of that number, if it has one; 0: reaps all that have already ended. */
void rendezvous_settle(uint64_t number, bool give_up);

#endif
