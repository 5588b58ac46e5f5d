/* The part of libibverbs' binary interface that the fake supports: numbers, layouts and prototypes, nothing else.
 *
 * Invariant: a program compiled against rdma-core's own header (or NCCL's copy of it) can be used with the fake, so every
 * number and every offset here is rdma-core's. A test compares the sizes with recorded ones.
 */
#ifndef FAKE_VERBS_ABI_H
#define FAKE_VERBS_ABI_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_EXPORT __attribute__((visibility("default")))

struct ibv_context;
struct ibv_srq;

union ibv_gid {
	uint8_t raw[16];
	struct {
		uint64_t subnet_prefix, interface_id; /* big-endian */
	} global;
};

struct ibv_device_attr {
	char fw_ver[64];
	uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
	uint32_t vendor_id, vendor_part_id, hw_ver;
	int max_qp, max_qp_wr;
	unsigned int device_cap_flags;
	int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom;
	int max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp;
	int max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr;
	int max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay, phys_port_cnt;
};

enum { IBV_MTU_4096 = 5, IBV_PORT_ACTIVE = 4, IBV_LINK_LAYER_ETHERNET = 2, IBV_ATOMIC_HCA = 1 };

/* As it was when ibv_query_port@IBVERBS_1.1 was made: later members are not written. */
struct ibv_port_attr {
	int state, max_mtu, active_mtu, gid_tbl_len;
	uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
	uint16_t pkey_tbl_len, lid, sm_lid;
	uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
	uint8_t link_layer, flags;
};

struct ibv_async_event {
	union {
		void *object;
		int port_num;
	} element;
	int event_type;
};

enum ibv_wc_status {
	IBV_WC_SUCCESS = 0,
	IBV_WC_LOC_LEN_ERR = 1,
	IBV_WC_LOC_PROT_ERR = 4,
	IBV_WC_WR_FLUSH_ERR = 5,
	IBV_WC_REM_ACCESS_ERR = 10,
	IBV_WC_RETRY_EXC_ERR = 12
};
enum ibv_wc_opcode {
	IBV_WC_SEND,
	IBV_WC_RDMA_WRITE,
	IBV_WC_RDMA_READ,
	IBV_WC_COMP_SWAP,
	IBV_WC_FETCH_ADD,
	IBV_WC_RECV = 128,
	IBV_WC_RECV_RDMA_WITH_IMM
};
enum { IBV_WC_WITH_IMM = 2 };

struct ibv_wc {
	uint64_t wr_id;
	enum ibv_wc_status status;
	enum ibv_wc_opcode opcode;
	uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
	unsigned int wc_flags;
	uint16_t pkey_index, slid;
	uint8_t sl, dlid_path_bits;
};

struct ibv_pd {
	struct ibv_context *context;
	uint32_t handle;
};

struct ibv_mr {
	struct ibv_context *context;
	struct ibv_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
};

struct ibv_global_route {
	union ibv_gid dgid;
	uint32_t flow_label;
	uint8_t sgid_index, hop_limit, traffic_class;
};

struct ibv_ah_attr {
	struct ibv_global_route grh;
	uint16_t dlid;
	uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct ibv_qp_cap {
	uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct ibv_qp_init_attr {
	void *qp_context;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_srq *srq;
	struct ibv_qp_cap cap;
	int qp_type, sq_sig_all;
};

enum { IBV_QPT_RC = 2 };
enum { IBV_QP_STATE = 1, IBV_QP_AV = 1 << 7, IBV_QP_DEST_QPN = 1 << 20 };
enum { IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR };

struct ibv_qp_attr {
	int qp_state, cur_qp_state, path_mtu, path_mig_state;
	uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
	unsigned int qp_access_flags;
	struct ibv_qp_cap cap;
	struct ibv_ah_attr ah_attr, alt_ah_attr;
	uint16_t pkey_index, alt_pkey_index;
	uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout;
	uint8_t retry_cnt, rnr_retry, alt_port_num, alt_timeout;
	uint32_t rate_limit;
};

enum ibv_wr_opcode {
	IBV_WR_RDMA_WRITE,
	IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_SEND,
	IBV_WR_SEND_WITH_IMM,
	IBV_WR_RDMA_READ,
	IBV_WR_ATOMIC_CMP_AND_SWP,
	IBV_WR_ATOMIC_FETCH_AND_ADD
};
enum { IBV_SEND_SIGNALED = 2, IBV_SEND_INLINE = 8 };

struct ibv_sge {
	uint64_t addr;
	uint32_t length, lkey;
};

struct ibv_send_wr {
	uint64_t wr_id;
	struct ibv_send_wr *next;
	struct ibv_sge *sg_list;
	int num_sge;
	enum ibv_wr_opcode opcode;
	unsigned int send_flags;
	uint32_t imm_data;
	union {
		struct {
			uint64_t remote_addr;
			uint32_t rkey;
		} rdma;
		struct {
			uint64_t remote_addr, compare_add, swap;
			uint32_t rkey;
		} atomic;
	} wr;
	uint64_t more[7]; /* of newer versions: never read */
};

struct ibv_recv_wr {
	uint64_t wr_id;
	struct ibv_recv_wr *next;
	struct ibv_sge *sg_list;
	int num_sge;
};

struct ibv_qp {
	struct ibv_context *context;
	void *qp_context;
	struct ibv_pd *pd;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_srq *srq;
	uint32_t handle, qp_num;
	int state, qp_type;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t events_completed;
};

struct ibv_comp_channel {
	struct ibv_context *context;
	int fd, refcnt;
};

struct ibv_cq {
	struct ibv_context *context;
	struct ibv_comp_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t comp_events_completed, async_events_completed;
};

struct ibv_ece {
	uint32_t vendor_id, options, comp_mask;
};

struct ibv_device {
	void *ops[2];
	int node_type, transport_type;
	char name[64];      /* "fakeib0" */
	char dev_name[64];  /* "uverbs0" */
	char dev_path[256]; /* in sysfs; the fake has none */
	char ibdev_path[256];
};

/* The calls that the header makes inline go through this table; the fake fills in those that are needed. */
struct ibv_context_ops {
	void *before_poll_cq[11];
	int (*poll_cq)(struct ibv_cq *cq, int room, struct ibv_wc *into);
	int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
	void *before_post_send[12];
	int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
	int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
	void *after_post_recv[5];
};

struct ibv_context {
	struct ibv_device *device;
	struct ibv_context_ops ops;
	int cmd_fd, async_fd, num_comp_vectors;
	pthread_mutex_t mutex;
	void *abi_compat; /* NULL: it has no extended calls */
};

FAKE_EXPORT struct ibv_device **ibv_get_device_list(int *count);
FAKE_EXPORT void ibv_free_device_list(struct ibv_device **list);
FAKE_EXPORT const char *ibv_get_device_name(struct ibv_device *device);
FAKE_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device);
FAKE_EXPORT int ibv_close_device(struct ibv_context *context);
FAKE_EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
FAKE_EXPORT void ibv_ack_async_event(struct ibv_async_event *event);
FAKE_EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes);
FAKE_EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes);
FAKE_EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
FAKE_EXPORT int ibv_fork_init(void);
FAKE_EXPORT const char *ibv_event_type_str(int type);

FAKE_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
FAKE_EXPORT int ibv_dealloc_pd(struct ibv_pd *pd);
FAKE_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *memory, size_t bytes, int access);
FAKE_EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *memory, size_t bytes, uint64_t iova,
					    unsigned int access);
FAKE_EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
					     int access);
FAKE_EXPORT int ibv_dereg_mr(struct ibv_mr *mr);

FAKE_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
FAKE_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
FAKE_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context,
					 struct ibv_comp_channel *channel, int vector);
FAKE_EXPORT int ibv_destroy_cq(struct ibv_cq *cq);
FAKE_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
FAKE_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count);

FAKE_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes);
FAKE_EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask);
FAKE_EXPORT int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *init);
FAKE_EXPORT int ibv_destroy_qp(struct ibv_qp *qp);
FAKE_EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece);
FAKE_EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece);

#endif
