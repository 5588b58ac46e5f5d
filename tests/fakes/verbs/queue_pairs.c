/* Queue pairs of the reliable kind. The number of one is the TCP port at which its peer's requests arrive, and the peer's
 * GID is the host's address, so the two together say where to connect to.
 *
 * Invariant: a queue pair has threads and sockets from RTR or RTS on, and none after ibv_destroy_qp.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

static int listen_anywhere(uint32_t *port)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t bytes = sizeof(address);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 || listen(fd, 4) != 0 ||
	    getsockname(fd, (struct sockaddr *)&address, &bytes) != 0) {
		close(fd);
		return -1;
	}
	*port = ntohs(address.sin_port);
	return fd;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
	struct fake_qp *qp = calloc(1, sizeof(*qp));

	if (!qp)
		return NULL;
	qp->listener = listen_anywhere(&qp->seen.qp_num);
	if (qp->listener < 0 || attributes->qp_type != IBV_QPT_RC) {
		if (qp->listener >= 0)
			close(qp->listener);
		free(qp);
		errno = EINVAL;
		return NULL;
	}
	qp->in = qp->out = -1;
	qp->seen.context = pd->context;
	qp->seen.qp_context = attributes->qp_context;
	qp->seen.pd = pd;
	qp->seen.send_cq = attributes->send_cq;
	qp->seen.recv_cq = attributes->recv_cq;
	qp->seen.qp_type = attributes->qp_type;
	qp->all_signaled = attributes->sq_sig_all;
	qp->last_send = &qp->sends;
	qp->last_receive = &qp->receives;
	pthread_mutex_init(&qp->seen.mutex, NULL);
	pthread_cond_init(&qp->seen.cond, NULL);
	return &qp->seen;
}

static void set_peer(struct fake_qp *qp, const struct ibv_qp_attr *attributes)
{
	struct sockaddr_in *peer = (struct sockaddr_in *)&qp->peer;

	peer->sin_family = AF_INET;
	peer->sin_port = htons((uint16_t)attributes->dest_qp_num);
	memcpy(&peer->sin_addr, attributes->ah_attr.grh.dgid.raw + 12, sizeof(peer->sin_addr));
	qp->has_peer = true;
}

int ibv_modify_qp(struct ibv_qp *given, struct ibv_qp_attr *attributes, int mask)
{
	struct fake_qp *qp = (struct fake_qp *)given;
	int failed = 0;

	pthread_mutex_lock(&given->mutex);
	if ((mask & IBV_QP_AV) && (mask & IBV_QP_DEST_QPN))
		set_peer(qp, attributes);
	if (mask & IBV_QP_STATE) {
		given->state = attributes->qp_state;
		if (given->state == IBV_QPS_RTR && !qp->responds) {
			failed = qp->has_peer ? pthread_create(&qp->responder, NULL, wire_respond, qp) : EINVAL;
			qp->responds = !failed;
		}
		if (given->state == IBV_QPS_RTS && !qp->requests) {
			failed = qp->has_peer ? pthread_create(&qp->requester, NULL, wire_request, qp) : EINVAL;
			qp->requests = !failed;
		}
	}
	pthread_mutex_unlock(&given->mutex);
	return failed;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *init)
{
	(void)mask;
	attributes->qp_state = qp->state; /* no more: older versions of the struct are shorter */
	attributes->port_num = 1;
	attributes->ah_attr.is_global = 0;
	init->qp_context = qp->qp_context;
	init->qp_type = qp->qp_type;
	return 0;
}

static void shut(int fd)
{
	if (fd >= 0)
		shutdown(fd, SHUT_RDWR);
}

static void drop(struct work *work)
{
	while (work) {
		struct work *next = work->next;

		free(work);
		work = next;
	}
}

int ibv_destroy_qp(struct ibv_qp *given)
{
	struct fake_qp *qp = (struct fake_qp *)given;

	pthread_mutex_lock(&given->mutex);
	qp->stopped = true;
	shut(qp->listener);
	shut(qp->in);
	shut(qp->out);
	pthread_cond_broadcast(&given->cond);
	pthread_mutex_unlock(&given->mutex);
	if (qp->responds)
		pthread_join(qp->responder, NULL);
	if (qp->requests)
		pthread_join(qp->requester, NULL);
	close(qp->listener);
	drop(qp->sends);
	drop(qp->receives);
	free(qp);
	return 0;
}

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return EOPNOTSUPP;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return EOPNOTSUPP;
}

static void append(struct fake_qp *qp, struct work ***last, struct work *work)
{
	pthread_mutex_lock(&qp->seen.mutex);
	**last = work;
	*last = &work->next;
	pthread_cond_broadcast(&qp->seen.cond);
	pthread_mutex_unlock(&qp->seen.mutex);
}

static struct work *work_of(uint64_t wr_id, const struct ibv_sge *pieces, int count, bool keep)
{
	size_t bytes = keep && count ? pieces->length : 0;
	struct work *work = count <= 1 ? calloc(1, sizeof(*work) + bytes) : NULL;

	if (!work)
		return NULL;
	work->wr_id = wr_id;
	if (count)
		work->piece = *pieces;
	if (bytes) {
		memcpy(work->kept, (const void *)(uintptr_t)pieces->addr, bytes);
		work->piece.addr = (uint64_t)(uintptr_t)work->kept;
	}
	return work;
}

int post_send(struct ibv_qp *given, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct fake_qp *qp = (struct fake_qp *)given;

	for (; wr; wr = wr->next) {
		struct work *work = work_of(wr->wr_id, wr->sg_list, wr->num_sge, wr->send_flags & IBV_SEND_INLINE);
		bool atomic = wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;

		if (!work || wr->opcode > IBV_WR_ATOMIC_FETCH_AND_ADD) {
			free(work);
			*bad = wr;
			return EINVAL;
		}
		work->opcode = wr->opcode;
		work->imm_data = wr->imm_data;
		work->remote_addr = atomic ? wr->wr.atomic.remote_addr : wr->wr.rdma.remote_addr;
		work->rkey = atomic ? wr->wr.atomic.rkey : wr->wr.rdma.rkey;
		work->compare_add = atomic ? wr->wr.atomic.compare_add : 0;
		work->swap = atomic ? wr->wr.atomic.swap : 0;
		work->signaled = qp->all_signaled || wr->send_flags & IBV_SEND_SIGNALED;
		append(qp, &qp->last_send, work);
	}
	return 0;
}

int post_receive(struct ibv_qp *given, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct fake_qp *qp = (struct fake_qp *)given;

	for (; wr; wr = wr->next) {
		struct work *work = work_of(wr->wr_id, wr->sg_list, wr->num_sge, false);

		if (!work) {
			*bad = wr;
			return EINVAL;
		}
		append(qp, &qp->last_receive, work);
	}
	return 0;
}

struct work *work_take(struct fake_qp *qp, bool receive)
{
	struct work **first = receive ? &qp->receives : &qp->sends, *work;

	pthread_mutex_lock(&qp->seen.mutex);
	while (!*first && !qp->stopped)
		pthread_cond_wait(&qp->seen.cond, &qp->seen.mutex);
	work = qp->stopped ? NULL : *first;
	if (work) {
		*first = work->next;
		if (!*first)
			*(receive ? &qp->last_receive : &qp->last_send) = first;
	}
	pthread_mutex_unlock(&qp->seen.mutex);
	return work;
}
