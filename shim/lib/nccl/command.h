/* The daemon's commands about NCCL. Each runs on a separate thread, so that one that hangs does not block the mailbox. */
#ifndef SNAPSHIM_NCCL_COMMAND_H
#define SNAPSHIM_NCCL_COMMAND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MESSAGE_BYTES 512

struct nccl_job {
	uint32_t command;
	uint64_t number; /* of the command, in the order in which the daemon gave them */
	int64_t until_ns;
	char *request; /* text, ended by 0 */
	int status;    /* 0 or an errno */
	char message[MESSAGE_BYTES];
	char *reply; /* text, malloc'ed; NULL: none */
	size_t reply_bytes;
	_Atomic bool given_up; /* the control thread does not wait any more */

	/* Used only by command.c, job.c and dispatch.c. */
	uint32_t done;
	char *stale; /* the previous answer, to be freed */
	_Atomic int holders;
	size_t bytes;
};

/* Start routines of threads: one carries out the job, the other aborts the call that blocks an attach. */
void *job_run(void *job);
void *job_cancel(void *job);

/* job.c */
void job_let_go(struct nccl_job *job);
bool job_claim(struct nccl_job *job); /* false: another command still calls NCCL */
/* Before a copy of NCCL is loaded, because commands that open the gate are not exclusive. 0, or the job has failed. */
int job_claim_loading(struct nccl_job *job);
void job_over(struct nccl_job *job); /* the next command that calls NCCL may begin */
void jobs_forget(void);

/* Whether to continue: time is left, and the control thread still waits. */
bool job_in_time(const struct nccl_job *job);
/* Records why it failed; the first reason stays. Returns `status`. */
int job_fails(struct nccl_job *job, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* detach.c, attach.c, report.c: 0 or an errno. Each can be repeated. */
int detach(struct nccl_job *job);
int attach(struct nccl_job *job);
/* Aborts the call that blocks this job's attach. If that has ended meanwhile, another one may be under way. */
void attach_cancel(const struct nccl_job *job);
int report(struct nccl_job *job);

/* The next line of the request; NULL at the end. */
char *job_line(char **rest);

#endif
