/* Records of threads: each thread finds its own through thread-local storage, the control thread finds all in a list. */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/shim.h"

_Thread_local struct nccl_thread *nccl_thread_of_mine __attribute__((tls_model("initial-exec")));

static struct nccl_thread *_Atomic first;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static uint32_t turn; /* incremented whenever threads that wait at the gate should check again */

static void leave(void *record)
{
	struct nccl_thread *thread = record;

	nccl_thread_of_mine = NULL;
	atomic_store_explicit(&thread->calling, OUTSIDE, memory_order_release);
	atomic_store_explicit(&thread->tid, 0, memory_order_release);
}

/* A forked child has one thread. It inherits the lock, which a thread that does not exist in the child may hold. */
static void in_child(void)
{
	struct nccl_thread *thread;

	pthread_mutex_init(&mutex, NULL);
	for (thread = atomic_load(&first); thread; thread = thread->next) {
		bool mine = thread == nccl_thread_of_mine;

		atomic_store(&thread->calling, OUTSIDE);
		atomic_store(&thread->tid, mine ? self_pid() : 0);
		thread->held = NULL;
	}
}

static void prepare(void)
{
	pthread_key_create(&key, leave);
	pthread_atfork(NULL, NULL, in_child);
}

struct nccl_thread *thread_make(void)
{
	pid_t tid = self_tid(), none;
	struct nccl_thread *thread;

	pthread_once(&once, prepare);
	for (thread = atomic_load(&first); thread; thread = thread->next) {
		none = 0;
		if (atomic_compare_exchange_strong(&thread->tid, &none, tid))
			break;
	}
	if (!thread) {
		thread = aligned_alloc(64, (sizeof(*thread) + 63) / 64 * 64);
		if (!thread)
			abort(); /* NCCL would end here as well, a little later */
		*thread = (struct nccl_thread){.tid = tid};
		thread->next = atomic_load(&first);
		while (!atomic_compare_exchange_weak(&first, &thread->next, thread))
			;
	}
	thread->depth = 0;
	thread->count = 0;
	thread->message[0] = 0;
	nccl_thread_of_mine = thread;
	pthread_setspecific(key, thread);
	return thread;
}

struct nccl_thread *thread_first(void)
{
	return atomic_load_explicit(&first, memory_order_acquire);
}

ncclResult_t thread_error(struct nccl_thread *thread, ncclResult_t result, const char *format, ...)
{
	va_list list;

	va_start(list, format);
	vsnprintf(thread->message, sizeof(thread->message), format, list);
	va_end(list);
	return result;
}

uint32_t held_turn(void)
{
	return LOAD(&turn);
}

void held_wait(uint32_t seen)
{
	wait_word(&turn, seen, FOREVER);
}

void held_look_again(void)
{
	__atomic_add_fetch(&turn, 1, __ATOMIC_ACQ_REL);
	wake_word(&turn);
}

void nccl_lock(uint64_t *before)
{
	*before = block_all_signals();
	pthread_mutex_lock(&mutex);
}

void nccl_unlock(const uint64_t *before)
{
	pthread_mutex_unlock(&mutex);
	set_signal_mask(*before);
}
