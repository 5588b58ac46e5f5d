/* One rank's communicator, its work, and the jobs that create communicators. */
#ifndef FAKE_NCCL_COMMUNICATOR_H
#define FAKE_NCCL_COMMUNICATOR_H

#include <pthread.h>
#include <stdatomic.h>

#include "errors.h"
#include "links.h"
#include "reductions.h"
#include "streams.h"

#define NAME_BYTES 64

/* One rank as the others see it. */
struct member {
	struct sockaddr_storage address; /* where it accepts connections while the communicator is being built */
	uint64_t host;
};

/* An operation as it was launched. */
struct operation {
	struct operation *next;
	struct ncclComm *comm;
	enum opcode opcode;
	const void *sendbuff;
	void *recvbuff;
	size_t count;
	ncclDataType_t datatype;
	struct reduction reduction;
	int root; /* or the peer of send and recv */
	cudaStream_t stream;
	struct fake_ticket *ticket;
};

/* The work of one launch for one communicator: a single operation, or all of a group. It runs and completes as a unit. */
struct batch {
	struct batch *next;
	struct operation *operations;
	bool finalize; /* the last one: notify the others, then close everything */
	bool same_host; /* … only those on this host */
};

struct operator_handle; /* registration.c */
struct registration;

struct ncclComm {
	struct ncclComm *next; /* in the list of all */
	uint64_t id;        /* the same on all members, and different from every other communicator's */
	int rank, nranks, device;
	bool blocking;
	char name[NAME_BYTES];
	struct member *members;
	struct link *data;    /* operations; used by the worker alone */
	struct link *control; /* splitting; used by jobs alone */
	int stop_fd;       /* readable: operations end */
	int abort_fd;       /* readable: jobs end as well */
	atomic_bool stopped;
	void *buffer; /* on the device, or NULL */

	/* Under library_lock. */
	bool ready, finalize_called, finalized, destroy_called, aborted, revoked;
	bool building; /* a blocking call creates it now */
	bool launch_unseen; /* non-blocking: the next ncclCommGetAsyncError says "in progress" once */
	int users;     /* calls and jobs inside; only at 0 may it be freed */
	int jobs;     /* splits under way on it */
	ncclResult_t async_result;
	char reason[WHY_BYTES];
	struct batch *batches;
	pthread_t worker, job;
	bool worker_started, worker_done, job_started;
	uint64_t splits;
	struct operator_handle *operators;
	struct registration *registrations;
};

/* One lock and one condition for everything that is not on the wire: a fake needs no concurrency, and one lock cannot
 * be taken in the wrong order. The lock of streams.c may be taken inside it. */
extern pthread_mutex_t library_lock;
extern pthread_cond_t library_changed;

/* communicator.c */
ncclResult_t comm_create(struct ncclComm **comm, const ncclConfig_t *config, const struct ncclComm *parent);
struct ncclComm *comm_enter(ncclComm_t handle); /* NULL (and a reason): no such communicator */
struct ncclComm *comm_enter_ready(ncclComm_t handle, ncclResult_t *result);
void comm_leave(struct ncclComm *comm);
void comm_stop(struct ncclComm *comm, bool jobs_too);
void comm_unlist(struct ncclComm *comm);     /* with the lock */
struct ncclComm *comm_listed(ncclComm_t handle);    /* with the lock */
struct ncclComm *comm_first(void);      /* with the lock */
void comm_fail(struct ncclComm *comm, ncclResult_t result); /* with the lock; the reason is the calling thread's */
void comm_free(struct ncclComm *comm);      /* unlisted, unused; ends its threads */
bool comm_copy_reason(ncclComm_t handle, char *reason);
bool start_thread(pthread_t *thread, void *(*body)(void *), void *argument, const char *name);

/* lifetime.c: ends what ncclCommAbort has stopped. */
void comm_abort(struct ncclComm *comm);

/* buffers.c */
ncclResult_t buffer_get(struct ncclComm *comm);
void buffer_drop(struct ncclComm *comm);

/* leavings.c: makes, once, what is to stay in the process. */
void keep_leavings(void);

/* worker.c */
ncclResult_t worker_start(struct ncclComm *comm);
void worker_give(struct ncclComm *comm, struct batch *batch); /* with the lock */

/* collectives.c */
ncclResult_t operations_run(struct ncclComm *comm, const struct batch *batch, const struct cancel *cancel);

/* registration.c */
ncclResult_t operator_resolve(struct ncclComm *comm, ncclRedOp_t op, ncclDataType_t datatype, struct reduction *reduction);
void registrations_free(struct ncclComm *comm);

/* bootstrap.c: `listener` is this rank's, whose address the members know. Both fill comm->members, data and control. */
ncclResult_t bootstrap_by_ids(struct ncclComm *comm, const ncclUniqueId *ids, int nids, const struct cancel *cancel);
ncclResult_t bootstrap_mesh(struct ncclComm *comm, int listener, const struct cancel *cancel);
ncclResult_t member_self(struct member *self, int *listener);

/* jobs.c: everything that creates a communicator. A group may collect jobs and run them at once. */
struct job {
	struct job *next;
	ncclResult_t (*run)(struct job *job);
	struct ncclComm *comm, *parent; /* either may be NULL; both are entered while the job exists */
	ncclComm_t *handle;
	struct job *siblings; /* all jobs of the group: when one fails, the others are cancelled */
	ncclResult_t result;
	pthread_t thread;

	ncclUniqueId *ids;
	int nids;
	int color, key;
	bool *excluded; /* shrink: by rank of the parent */
	int nexcluded;
};

struct job *job_create(ncclResult_t (*run)(struct job *), struct ncclComm *comm, struct ncclComm *parent, ncclComm_t *handle);
ncclResult_t jobs_run(struct job *jobs, bool blocking); /* takes them */
void jobs_drop(struct job *jobs);
struct cancel job_cancel(const struct job *job);

/* groups.c: runs at once outside a group, at its end inside. */
ncclResult_t group_add_operation(const struct operation *operation); /* the caller is inside operation->comm */
ncclResult_t group_add_job(struct job *job);
bool group_add_abort(struct ncclComm *comm); /* false: no group is open */
void group_start(void);
ncclResult_t group_end(void);
ncclResult_t group_note(ncclResult_t result); /* a call that failed inside a group fails the group */

#endif
