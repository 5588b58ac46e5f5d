/* What the files of the fake share. Every struct begins with the one that the program sees. */
#ifndef FAKE_VERBS_H
#define FAKE_VERBS_H

#include <stdbool.h>
#include <sys/socket.h>

#include "verbs_abi.h"

struct work { /* a request that was posted, with its one piece of memory */
	struct work *next;
	uint64_t wr_id;
	struct ibv_sge piece;
	enum ibv_wr_opcode opcode;
	uint32_t imm_data, rkey;
	uint64_t remote_addr, compare_add, swap;
	bool signaled;
	char kept[]; /* inline data */
};

struct fake_context {
	struct ibv_context seen;
	struct ibv_device device; /* a copy: the list may be freed */
	void *doorbells;          /* a page of the device, mapped */
	int events;               /* the other end of async_fd */
};

struct fake_qp {
	struct ibv_qp seen;
	int listener, in, out; /* -1: none */
	struct sockaddr_storage peer;
	bool all_signaled, stopped, has_peer;
	struct work *sends, **last_send, *receives, **last_receive;
	pthread_t responder, requester;
	bool responds, requests; /* the threads were started */
};

/* devices.c */
void gid_of_this_host(union ibv_gid *gid);

/* memory.c: the memory of a registration, NULL if the key does not allow it. */
void *memory_by_key(uint32_t key, uint64_t address, size_t bytes);

/* completions.c */
void completion_add(struct ibv_cq *cq, const struct ibv_wc *completion);
int completions_poll(struct ibv_cq *cq, int room, struct ibv_wc *into);
int completions_arm(struct ibv_cq *cq, int solicited_only);

/* queue_pairs.c */
int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct work *work_take(struct fake_qp *qp, bool receive); /* waits; NULL: the queue pair is stopped */

/* wire.c: the two threads of a queue pair. */
void *wire_respond(void *qp);
void *wire_request(void *qp);

#endif
