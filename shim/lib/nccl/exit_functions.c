/* Ends RAS, NCCL's service for diagnosis: a thread, a pipe and sockets that outlive the last communicator.
 *
 * From version 2.28 on, NCCL ends it in a function that it registers with atexit when RAS starts, and which is not exported.
 * atexit is __cxa_atexit with the argument NULL, so that is wrapped, and NCCL's functions are remembered. Older versions end RAS
 * in a destructor of the library; there it stays, and a move is undone by its name.
 *
 * NCCL registers other functions too, and before that of RAS. So the newest is called first, and only while NCCL has more threads
 * than those of unused unique ids. At the exit of the process it is called again, which NCCL's function expects: then it does
 * nothing.
 */
#define _GNU_SOURCE
#include "exit_functions.h"

#include <dlfcn.h>

#include "core/shim.h"
#include "ids.h"
#include "own_threads.h"
#include "real.h"

/* Threads of a communicator end shortly after it. */
#define LOOKS 40
#define LOOK_AGAIN_US 5000
#define UNSURE_LOOKS 3

#ifndef __SANITIZE_THREAD__ /* its runtime registers functions before it can run instrumented code */
typedef int (*register_function)(void (*)(void *), void *, void *);

SNAPSHIM_EXPORT int __cxa_atexit(void (*function)(void *), void *argument, void *library);

static void remember(struct nccl_instance *instance, void (*function)(void *))
{
	for (int i = 0; i < EXIT_FUNCTIONS_MAX; i++) {
		void (*none)(void *) = NULL;

		if (SWAP_IF(&instance->exit_functions[i], &none, function))
			return;
	}
}

/* Constructors call this before ours has run, and the runtime of a sanitizer before it is initialised. */
__attribute__((no_sanitize("address", "thread"))) SNAPSHIM_EXPORT int __cxa_atexit(void (*function)(void *), void *argument,
										   void *library)
{
	static register_function next;
	struct nccl_instance *instance;
	int failed;

	if (!LOAD(&next))
		STORE(&next, (register_function)dlsym(RTLD_NEXT, "__cxa_atexit"));
	failed = next(function, argument, library);
	instance = failed || argument ? NULL : real_containing((void *)function);
	if (instance)
		remember(instance, function);
	return failed;
}
#endif

static void (*newest_of(struct nccl_instance *instance))(void *)
{
	for (int i = EXIT_FUNCTIONS_MAX - 1; i >= 0; i--) {
		void (*function)(void *) = LOAD(&instance->exit_functions[i]);

		if (function) {
			STORE(&instance->exit_functions[i], NULL);
			return function;
		}
	}
	return NULL;
}

/* Whether the instance has a thread that is not explained, also after a while. Threads of the job that run at each look cannot be
 * inspected; those of NCCL that are left wait nearly all the time. */
static bool has_threads(struct nccl_job *job, const struct nccl_instance *instance)
{
	for (int looks = 1;; looks++) {
		int unseen = 0, count = threads_started_by(instance, &unseen);

		if (count <= ids_unused() && (!unseen || looks >= UNSURE_LOOKS))
			return false;
		if (looks >= LOOKS || !job_in_time(job))
			return count > ids_unused();
		pause_us(LOOK_AGAIN_US);
	}
}

void exit_functions_release(struct nccl_job *job)
{
	for (struct nccl_instance *instance = real_instance(); instance; instance = instance->before)
		while (instance->text_to && LOAD(&instance->exit_functions[0]) && has_threads(job, instance)) {
			void (*function)(void *) = newest_of(instance);

			STORE(&instance->released, 1);
			function(NULL);
		}
}
