/* RDMA, if FAKE_NCCL_NET=IB: the devices, which are opened once and stay open, and byte streams over queue pairs. */
#ifndef FAKE_NCCL_IB_H
#define FAKE_NCCL_IB_H

#include <sys/uio.h>

#include "../verbs/verbs_abi.h"
#include "network.h"

/* libibverbs' functions, looked up as NCCL does it. */
#define IB_FUNCTIONS(X)                                                                                       \
	X(ibv_get_device_list) X(ibv_free_device_list) X(ibv_open_device) X(ibv_close_device)                 \
	X(ibv_get_async_event) X(ibv_ack_async_event) X(ibv_query_gid) X(ibv_alloc_pd) X(ibv_dealloc_pd)      \
	X(ibv_reg_mr) X(ibv_dereg_mr) X(ibv_create_cq) X(ibv_destroy_cq) X(ibv_get_cq_event)                  \
	X(ibv_ack_cq_events) X(ibv_create_qp) X(ibv_modify_qp) X(ibv_destroy_qp)

struct ib_functions {
#define X(name) __typeof__(&name) name;
	IB_FUNCTIONS(X)
#undef X
	__typeof__(&ibv_create_comp_channel) ibv_create_comp_channel;
	__typeof__(&ibv_destroy_comp_channel) ibv_destroy_comp_channel;
};
extern struct ib_functions ib;

bool ib_wanted(void);
/* The context of a device; every call gives the next one. The first call opens all devices. */
ncclResult_t ib_next_device(struct ibv_context **context);

/* A stream beside a connection: both ends call this at the same place. The connection stays; its end is the stream's. */
struct ib_stream;
ncclResult_t ib_stream_open(struct ib_stream **stream, int connection, const struct cancel *cancel);
ssize_t ib_stream_send(struct ib_stream *stream, const struct iovec *parts, int count); /* as sendmsg without blocking */
ssize_t ib_stream_receive(struct ib_stream *stream, void *into, size_t bytes);          /* as recv without blocking */
int ib_stream_fd(const struct ib_stream *stream); /* readable: try both again */
void ib_stream_close(struct ib_stream *stream, bool drain); /* `drain`: after all that was sent has arrived */

#endif
