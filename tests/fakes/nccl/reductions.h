/* Elements and their arithmetic. */
#ifndef FAKE_NCCL_REDUCTIONS_H
#define FAKE_NCCL_REDUCTIONS_H

#include <stdbool.h>

#include "nccl_abi.h"

#define SCALAR_BYTES 8

/* An operator as it was when the operation was launched: the handle may be destroyed while the operation still runs. */
struct reduction {
	ncclRedOp_t kind; /* ncclNumOps stands for PreMulSum */
	unsigned char value[SCALAR_BYTES];
	const void *scalar; /* read when the operation runs; NULL: `value` holds it */
};

size_t element_bytes(ncclDataType_t datatype); /* 0: no such type */
bool reducible(ncclDataType_t datatype);
/* destination[i] = blocks[0][i] op blocks[1][i] op …, in this order. May be written over one of the blocks. Half-sized
 * floats are summed as float and rounded once. */
void reduce_blocks(void *destination, const void *const *blocks, int nblocks, size_t count, ncclDataType_t datatype,
		   ncclRedOp_t kind);
/* destination[i] = source[i] × scalar, rounded to the type. */
void scale(void *destination, const void *source, size_t count, ncclDataType_t datatype, const struct reduction *reduction);

#endif
