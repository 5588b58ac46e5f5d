/* A byte stream over a queue pair: sends of at most a slot, into receives that are posted in advance.
 *
 * The connection beside it only exchanges the two addresses, and its end is the end of the stream, as NCCL keeps a socket
 * beside its queue pairs. Invariant: a slot is either free, posted, or has bytes that were not taken yet.
 */
#define _GNU_SOURCE
#include "ib.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "errors.h"

#define SLOTS 8
#define SLOT_BYTES 16384
#define DRAIN_MS 10000

struct ib_stream {
	int connection;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *memory;
	bool sending[SLOTS], broken;
	int arrived[SLOTS]; /* slots with bytes, in their order */
	size_t bytes[SLOTS], taken; /* in a slot; of the first one that arrived */
	int narrived;
	char slots[2 * SLOTS][SLOT_BYTES]; /* to send, then to receive */
};

struct end {
	union ibv_gid gid;
	uint32_t number, unused;
};

static void post_receive(struct ib_stream *stream, int slot)
{
	struct ibv_sge piece = {
		.addr = (uint64_t)(uintptr_t)stream->slots[SLOTS + slot], .length = SLOT_BYTES, .lkey = stream->memory->lkey};
	struct ibv_recv_wr wr = {.wr_id = (uint64_t)(SLOTS + slot), .sg_list = &piece, .num_sge = 1}, *bad;

	if (stream->qp->context->ops.post_recv(stream->qp, &wr, &bad) != 0)
		stream->broken = true;
}

/* Takes all completions. Armed before the queue is read: what completes later makes the channel readable. */
static void progress(struct ib_stream *stream)
{
	struct pollfd watched = {.fd = stream->channel->fd, .events = POLLIN};
	struct ibv_wc done;

	if (poll(&watched, 1, 0) > 0) {
		struct ibv_cq *cq;
		void *context;

		if (ib.ibv_get_cq_event(stream->channel, &cq, &context) == 0)
			ib.ibv_ack_cq_events(cq, 1);
	}
	stream->cq->context->ops.req_notify_cq(stream->cq, 0);
	while (stream->cq->context->ops.poll_cq(stream->cq, 1, &done) == 1) {
		int slot = (int)done.wr_id;

		if (done.status != IBV_WC_SUCCESS) {
			stream->broken = true;
		} else if (slot < SLOTS) {
			stream->sending[slot] = false;
		} else {
			stream->bytes[slot - SLOTS] = done.byte_len;
			stream->arrived[stream->narrived++] = slot - SLOTS;
		}
	}
}

static bool connection_ended(const struct ib_stream *stream)
{
	char byte;
	ssize_t got = recv(stream->connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

static ncclResult_t build(struct ib_stream *stream, struct ibv_context *context)
{
	struct ibv_qp_init_attr wanted = {.qp_type = IBV_QPT_RC, .cap = {SLOTS, SLOTS, 1, 1, 0}};
	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};

	stream->pd = ib.ibv_alloc_pd(context);
	stream->channel = ib.ibv_create_comp_channel(context);
	stream->cq = ib.ibv_create_cq(context, 4 * SLOTS, stream, stream->channel, 0);
	if (!stream->pd || !stream->channel || !stream->cq)
		return failed(ncclSystemError, "cannot create a completion queue");
	wanted.send_cq = wanted.recv_cq = stream->cq;
	stream->memory = ib.ibv_reg_mr(stream->pd, stream->slots, sizeof(stream->slots), 1);
	stream->qp = ib.ibv_create_qp(stream->pd, &wanted);
	if (!stream->memory || !stream->qp || ib.ibv_modify_qp(stream->qp, &init, IBV_QP_STATE) != 0)
		return failed(ncclSystemError, "cannot create a queue pair: %s", strerror(errno));
	for (int i = 0; i < SLOTS; i++)
		post_receive(stream, i);
	return ncclSuccess;
}

static ncclResult_t join(struct ib_stream *stream, const struct cancel *cancel)
{
	struct ibv_qp_attr ready = {.qp_state = IBV_QPS_RTR};
	struct end mine = {.number = stream->qp->qp_num}, theirs;
	ncclResult_t result;

	if (ib.ibv_query_gid(stream->qp->context, 1, 0, &mine.gid) != 0)
		return failed(ncclSystemError, "the RDMA device has no address");
	result = network_send(stream->connection, &mine, sizeof(mine), cancel);
	if (result == ncclSuccess)
		result = network_receive(stream->connection, &theirs, sizeof(theirs), cancel);
	if (result != ncclSuccess)
		return result;
	ready.ah_attr.is_global = 1;
	ready.ah_attr.grh.dgid = theirs.gid;
	ready.dest_qp_num = theirs.number;
	if (ib.ibv_modify_qp(stream->qp, &ready, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN) != 0)
		return failed(ncclSystemError, "the queue pair cannot receive");
	ready.qp_state = IBV_QPS_RTS;
	return ib.ibv_modify_qp(stream->qp, &ready, IBV_QP_STATE) ? failed(ncclSystemError, "the queue pair cannot send") :
								    ncclSuccess;
}

ncclResult_t ib_stream_open(struct ib_stream **made, int connection, const struct cancel *cancel)
{
	struct ib_stream *stream = calloc(1, sizeof(*stream));
	struct ibv_context *context;
	ncclResult_t result = stream ? ib_next_device(&context) : failed(ncclSystemError, "out of memory");

	if (result != ncclSuccess) {
		free(stream);
		return result;
	}
	stream->connection = connection;
	result = build(stream, context);
	if (result == ncclSuccess)
		result = join(stream, cancel);
	if (result == ncclSuccess)
		*made = stream;
	else
		ib_stream_close(stream, false);
	return result;
}

static ssize_t would_block(const struct ib_stream *stream)
{
	errno = stream->broken || connection_ended(stream) ? EPIPE : EAGAIN;
	return -1;
}

ssize_t ib_stream_send(struct ib_stream *stream, const struct iovec *parts, int count)
{
	struct ibv_sge piece = {.lkey = stream->memory->lkey};
	struct ibv_send_wr wr = {
		.sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED, .wr_id = 0};
	struct ibv_send_wr *bad;
	size_t bytes = 0;
	int slot = 0;

	progress(stream);
	while (slot < SLOTS && stream->sending[slot])
		slot++;
	if (slot == SLOTS || stream->broken)
		return would_block(stream);
	for (int i = 0; i < count && bytes < SLOT_BYTES; i++) {
		size_t part = parts[i].iov_len < SLOT_BYTES - bytes ? parts[i].iov_len : SLOT_BYTES - bytes;

		if (part)
			memcpy(stream->slots[slot] + bytes, parts[i].iov_base, part);
		bytes += part;
	}
	piece.addr = (uint64_t)(uintptr_t)stream->slots[slot];
	piece.length = (uint32_t)bytes;
	wr.wr_id = (uint64_t)slot;
	if (stream->qp->context->ops.post_send(stream->qp, &wr, &bad) != 0) {
		errno = EPIPE;
		return -1;
	}
	stream->sending[slot] = true;
	return (ssize_t)bytes;
}

ssize_t ib_stream_receive(struct ib_stream *stream, void *into, size_t bytes)
{
	int slot;
	size_t left;

	progress(stream);
	if (!stream->narrived) {
		would_block(stream);
		progress(stream); /* what arrived before the end of the connection */
		if (!stream->narrived)
			return errno == EAGAIN ? -1 : 0;
	}
	slot = stream->arrived[0];
	left = stream->bytes[slot] - stream->taken;
	if (bytes > left)
		bytes = left;
	memcpy(into, stream->slots[SLOTS + slot] + stream->taken, bytes);
	stream->taken += bytes;
	if (stream->taken == stream->bytes[slot]) {
		memmove(stream->arrived, stream->arrived + 1, sizeof(int) * (size_t)--stream->narrived);
		stream->taken = 0;
		post_receive(stream, slot);
	}
	return (ssize_t)bytes;
}

int ib_stream_fd(const struct ib_stream *stream)
{
	return stream->channel->fd;
}

static bool all_arrived(struct ib_stream *stream)
{
	progress(stream);
	for (int i = 0; i < SLOTS; i++)
		if (stream->sending[i] && !stream->broken)
			return false;
	return true;
}

void ib_stream_close(struct ib_stream *stream, bool drain)
{
	for (int waited_ms = 0; drain && waited_ms < DRAIN_MS && !all_arrived(stream); waited_ms++)
		nanosleep(&(struct timespec){0, 1000000}, NULL);
	if (stream->qp)
		ib.ibv_destroy_qp(stream->qp);
	if (stream->memory)
		ib.ibv_dereg_mr(stream->memory);
	if (stream->cq)
		ib.ibv_destroy_cq(stream->cq);
	if (stream->channel)
		ib.ibv_destroy_comp_channel(stream->channel);
	if (stream->pd)
		ib.ibv_dealloc_pd(stream->pd);
	free(stream);
}
