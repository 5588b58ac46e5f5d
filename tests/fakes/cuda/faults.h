/* What shall go wrong, read afresh at every call: a line per fault in the file "faults".
 *
 *   OPERATION: ACTION [once] [pid=N]
 *
 * OPERATION  state lock checkpoint restore unlock (pid: of the process asked about), nvml, and a program's own calls (pid:
 *            as it numbers itself): init, create (cuMemCreate), map (cuMemMap), copy (asynchronous copies), pin,
 *            ask (cuMemHostGetFlags, with its lock held)
 * ACTION     hang | hang-after | die | die-after | kill | lose | fail:ERROR | slow:MS
 */
#ifndef FAKE_CUDA_FAULTS_H
#define FAKE_CUDA_FAULTS_H

enum fault_action {
	FAULT_NONE,
	FAULT_HANG,   /* nothing is done, the call does not return */
	FAULT_HANG_AFTER, /* it is done, the call does not return */
	FAULT_DIE,   /* nothing is done, the calling process is killed */
	FAULT_DIE_AFTER,  /* asked for, and the calling process is killed at once: the other one finishes it alone */
	FAULT_KILL,   /* the process asked about is killed, then the call goes its way */
	FAULT_LOSE,   /* the process's state becomes FAILED */
	FAULT_FAIL,   /* nothing is done, the call returns `error` */
	FAULT_SLOW   /* it takes `delay_ms` longer, in the middle */
};

struct fault {
	enum fault_action action;
	int error;
	unsigned int delay_ms;
};

struct fault fault_take(const char *operation, int pid);
/* In a program's own call: hangs, dies or waits as the file says; the error the call shall return, 0: it goes its way. */
int fault_in_call(const char *operation);
_Noreturn void fault_hang(void);
_Noreturn void fault_die(void);

#endif
