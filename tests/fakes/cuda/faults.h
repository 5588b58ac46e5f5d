/* Injected faults: one per line of the file "faults", which is read at every call.
 *
 *   OPERATION: ACTION [once] [pid=N]
 *
 * OPERATION  state lock checkpoint restore unlock (pid: of the target process), nvml, and a program's own calls (pid: in
 *            its own pid namespace): init, create (cuMemCreate), map (cuMemMap), unmap, access (cuMemSetAccess), export,
 *            import, copy (asynchronous copies), pin,
 *            ask (cuMemHostGetFlags, with its lock held)
 * ACTION     hang | hang-after | die | die-after | kill | lose | fail:ERROR | slow:MS | hold (a program's own calls only)
 */
#ifndef FAKE_CUDA_FAULTS_H
#define FAKE_CUDA_FAULTS_H

enum fault_action {
	FAULT_NONE,
	FAULT_HANG,   /* does nothing and does not return */
	FAULT_HANG_AFTER, /* does the operation and does not return */
	FAULT_DIE,   /* does nothing and kills the calling process */
	FAULT_DIE_AFTER,  /* kills the calling process right after the request, which the target process finishes */
	FAULT_KILL,   /* kills the target process, then continues */
	FAULT_LOSE,   /* sets the state of the process to FAILED */
	FAULT_FAIL,   /* does nothing and returns `error` */
	FAULT_SLOW,  /* waits for `delay_ms` in the middle */
	FAULT_HOLD   /* waits until its line is removed from the file, then continues */
};

struct fault {
	enum fault_action action;
	int error;
	unsigned int delay_ms;
};

struct fault fault_take(const char *operation, int pid);
/* For a program's own calls: hangs, dies or waits as the file says. Returns the error for the call, or 0 to continue. */
int fault_in_call(const char *operation);
_Noreturn void fault_hang(void);
_Noreturn void fault_die(void);

#endif
