/* What two queue pairs say to each other over TCP: a request with its data, then an answer with a status and, for reads and
 * atomics, data. One request is under way at a time, so requests are done in the order in which they were posted.
 *
 * Data is written to memory in ascending order, word by word: programs poll the last word of what a peer writes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

#define MAGIC 0x56455242u
#define CONNECT_S 10

struct request {
	uint32_t magic, opcode, imm_data, rkey, bytes, unused;
	uint64_t remote_addr, compare_add, swap;
};

struct answer {
	uint32_t status, bytes;
};

static bool send_all(int fd, const void *data, size_t bytes)
{
	while (bytes) {
		ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent <= 0)
			return false;
		data = (const char *)data + sent;
		bytes -= (size_t)sent;
	}
	return true;
}

static bool receive_all(int fd, void *data, size_t bytes)
{
	while (bytes) {
		ssize_t got = recv(fd, data, bytes, 0);

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return false;
		data = (char *)data + got;
		bytes -= (size_t)got;
	}
	return true;
}

static void put(char *into, const char *from, size_t bytes)
{
	for (; bytes && (uintptr_t)into % sizeof(uint64_t); bytes--)
		__atomic_store_n(into++, *from++, __ATOMIC_RELEASE);
	for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), into += sizeof(uint64_t), from += sizeof(uint64_t)) {
		uint64_t word;

		memcpy(&word, from, sizeof(word));
		__atomic_store_n((uint64_t *)(void *)into, word, __ATOMIC_RELEASE);
	}
	for (; bytes; bytes--)
		__atomic_store_n(into++, *from++, __ATOMIC_RELEASE);
}

/* Receives `bytes` to an address; NULL: they are dropped. */
static bool receive_to(int fd, char *into, size_t bytes)
{
	char piece[65536];

	while (bytes) {
		size_t part = bytes < sizeof(piece) ? bytes : sizeof(piece);

		if (!receive_all(fd, piece, part))
			return false;
		if (into) {
			put(into, piece, part);
			into += part;
		}
		bytes -= part;
	}
	return true;
}

/* ------------------------------------------------------------ the side whose memory is read and written */

static bool answer_with(int fd, enum ibv_wc_status status, const void *data, uint32_t bytes)
{
	struct answer answer = {.status = status, .bytes = bytes};

	return send_all(fd, &answer, sizeof(answer)) && send_all(fd, data, bytes);
}

static void consume(struct fake_qp *qp, struct work *receive, const struct request *request, enum ibv_wc_status status)
{
	bool write = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct ibv_wc completion = {.wr_id = receive->wr_id,
				    .status = status,
				    .opcode = write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
				    .byte_len = request->bytes,
				    .imm_data = request->imm_data,
				    .qp_num = qp->seen.qp_num,
				    .wc_flags = write || request->opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_WITH_IMM : 0};

	completion_add(qp->seen.recv_cq, &completion);
	free(receive);
}

static bool take_send(struct fake_qp *qp, const struct request *request)
{
	struct work *receive = work_take(qp, true);
	bool fits = receive && request->bytes <= receive->piece.length;
	enum ibv_wc_status status = fits ? IBV_WC_SUCCESS : IBV_WC_LOC_LEN_ERR;

	if (!receive)
		return false;
	if (!receive_to(qp->in, fits ? (char *)(uintptr_t)receive->piece.addr : NULL, request->bytes)) {
		free(receive);
		return false;
	}
	consume(qp, receive, request, status);
	return answer_with(qp->in, status, NULL, 0);
}

static bool take_write(struct fake_qp *qp, const struct request *request)
{
	char *into = request->bytes ? memory_by_key(request->rkey, request->remote_addr, request->bytes) : NULL;
	enum ibv_wc_status status = into || !request->bytes ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR;

	if (!receive_to(qp->in, into, request->bytes))
		return false;
	if (status == IBV_WC_SUCCESS && request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
		struct work *receive = work_take(qp, true);

		if (!receive)
			return false;
		consume(qp, receive, request, status);
	}
	return answer_with(qp->in, status, NULL, 0);
}

static bool give_read(struct fake_qp *qp, const struct request *request)
{
	const void *from = memory_by_key(request->rkey, request->remote_addr, request->bytes);

	if (!from && request->bytes)
		return answer_with(qp->in, IBV_WC_REM_ACCESS_ERR, NULL, 0);
	return answer_with(qp->in, IBV_WC_SUCCESS, from, request->bytes);
}

static bool do_atomic(struct fake_qp *qp, const struct request *request)
{
	uint64_t *word = memory_by_key(request->rkey, request->remote_addr, sizeof(*word)), before;

	if (!word)
		return answer_with(qp->in, IBV_WC_REM_ACCESS_ERR, NULL, 0);
	before = request->compare_add;
	if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		before = __atomic_fetch_add(word, request->compare_add, __ATOMIC_SEQ_CST);
	else
		__atomic_compare_exchange_n(word, &before, request->swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return answer_with(qp->in, IBV_WC_SUCCESS, &before, sizeof(before));
}

void *wire_respond(void *given)
{
	struct fake_qp *qp = given;
	int fd = accept4(qp->listener, NULL, NULL, SOCK_CLOEXEC), on = 1;
	struct request request;
	bool goes_on;

	pthread_mutex_lock(&qp->seen.mutex);
	goes_on = fd >= 0 && !qp->stopped;
	qp->in = goes_on ? fd : -1;
	pthread_mutex_unlock(&qp->seen.mutex);
	if (fd >= 0)
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	while (goes_on && receive_all(fd, &request, sizeof(request)) && request.magic == MAGIC)
		switch (request.opcode) {
		case IBV_WR_SEND:
		case IBV_WR_SEND_WITH_IMM:
			goes_on = take_send(qp, &request);
			break;
		case IBV_WR_RDMA_READ:
			goes_on = give_read(qp, &request);
			break;
		case IBV_WR_ATOMIC_CMP_AND_SWP:
		case IBV_WR_ATOMIC_FETCH_AND_ADD:
			goes_on = do_atomic(qp, &request);
			break;
		default:
			goes_on = take_write(qp, &request);
		}
	pthread_mutex_lock(&qp->seen.mutex);
	qp->in = -1;
	pthread_mutex_unlock(&qp->seen.mutex);
	if (fd >= 0)
		close(fd);
	return NULL;
}

/* ------------------------------------------------------------ the side that posts requests */

static int connect_to_peer(struct fake_qp *qp)
{
	struct timeval limit = {.tv_sec = CONNECT_S}, none = {0};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;

	if (fd < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	if (connect(fd, (struct sockaddr *)&qp->peer, sizeof(struct sockaddr_in)) != 0) {
		close(fd);
		return -1;
	}
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof(none));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return fd;
}

static enum ibv_wc_status do_request(int fd, const struct work *work)
{
	bool reads = work->opcode >= IBV_WR_RDMA_READ;
	struct request request = {.magic = MAGIC,
				  .opcode = work->opcode,
				  .imm_data = work->imm_data,
				  .rkey = work->rkey,
				  .bytes = work->piece.length,
				  .remote_addr = work->remote_addr,
				  .compare_add = work->compare_add,
				  .swap = work->swap};
	struct answer answer;

	if (!send_all(fd, &request, sizeof(request)) ||
	    (!reads && !send_all(fd, (const void *)(uintptr_t)work->piece.addr, work->piece.length)) ||
	    !receive_all(fd, &answer, sizeof(answer)) || answer.bytes > work->piece.length ||
	    !receive_to(fd, (char *)(uintptr_t)work->piece.addr, answer.bytes))
		return IBV_WC_RETRY_EXC_ERR;
	return (enum ibv_wc_status)answer.status;
}

static void complete(struct fake_qp *qp, const struct work *work, enum ibv_wc_status status)
{
	static const enum ibv_wc_opcode opcodes[] = {
		[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
		[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
		[IBV_WR_SEND] = IBV_WC_SEND,
		[IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
		[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
		[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
		[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
	};
	struct ibv_wc completion = {.wr_id = work->wr_id,
				    .status = status,
				    .opcode = opcodes[work->opcode],
				    .byte_len = work->piece.length,
				    .qp_num = qp->seen.qp_num};

	if (work->signaled || status != IBV_WC_SUCCESS)
		completion_add(qp->seen.send_cq, &completion);
}

void *wire_request(void *given)
{
	struct fake_qp *qp = given;
	int fd = connect_to_peer(qp);
	enum ibv_wc_status status = fd < 0 ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS;
	struct work *work;

	pthread_mutex_lock(&qp->seen.mutex);
	qp->out = fd;
	pthread_mutex_unlock(&qp->seen.mutex);
	while ((work = work_take(qp, false))) {
		bool worked = status == IBV_WC_SUCCESS;

		if (worked)
			status = do_request(fd, work);
		complete(qp, work, status);
		if (status != IBV_WC_SUCCESS)
			status = IBV_WC_WR_FLUSH_ERR; /* for all that follow */
		free(work);
	}
	pthread_mutex_lock(&qp->seen.mutex);
	qp->out = -1;
	pthread_mutex_unlock(&qp->seen.mutex);
	if (fd >= 0)
		close(fd);
	return NULL;
}
