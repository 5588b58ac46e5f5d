/* The internal interface between the files of libsnapshim.so. Nothing here is exported. */
#ifndef SNAPSHIM_SHIM_H
#define SNAPSHIM_SHIM_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "abi.h"
#include "kernel.h"

#define LOAD(place) __atomic_load_n(place, __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(place, value, __ATOMIC_RELEASE)
#define SWAP_IF(place, expected, value) \
	__atomic_compare_exchange_n(place, expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

/* mailbox.c: appends to the mailbox's text, which is truncated when it is full. */
void add_text(const char *text);
void add_number(long number);

/* lockless.c: time and waiting without libc's locks or memory. */
int64_t now_ns(void);
void pause_us(long us);
int self_tid(void);
int self_pid(void);
/* Waits while *word is `value`, at most `ns`; may return earlier. */
#define FOREVER INT64_MAX
void wait_word(uint32_t *word, uint32_t value, int64_t ns);
void wake_word(uint32_t *word);
uint64_t block_all_signals(void);
void set_signal_mask(uint64_t mask);

/* tasks.c: the threads and descriptors of this process, as the kernel lists them. */
struct listing {
	int fd, at, filled;
	const char *name; /* of the last entry read */
	char buffer[1024] __attribute__((aligned(8)));
};
int listing_open(struct listing *listing, const char *path); /* 0 or an errno */
int listing_next(struct listing *listing);                   /* the next entry that is a number, -1 at the end */
int listing_threads(const struct listing *listing);          /* of /proc/self/task: how many the kernel counts now */
void listing_close(struct listing *listing);
struct task {
	char state; /* as in /proc/PID/stat; 0: gone */
	char name[16];
};
#define TASKS "/proc/self/task"
void task_look(int tid, struct task *task);
bool task_blocks_signal(int tid);
/* Sends the reserved signal: interrupts the thread's system call, and parks it while PARK runs. 0 or a negative errno. */
long signal_thread(int tid);

/* maps.c: the mappings of this process. */
struct maps {
	int fd, at, filled;
	char buffer[1024];
};
struct mapping {
	uintptr_t from, to;
	bool readable, executable;
	char path[64]; /* its start */
	char name[32]; /* the start of its last part */
};
bool maps_open(struct maps *maps);
bool maps_next(struct maps *maps, struct mapping *mapping);
void maps_close(struct maps *maps);

/* exempt_threads.c: threads that are never parked, and libc's functions to create and end threads. */
typedef int create_thread_fn(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
void threads_resolve(void);
create_thread_fn *libc_create_thread(void);
void libc_exit_thread(void *value) __attribute__((noreturn));
create_thread_fn create_exempt_thread; /* one of ours; it blocks all signals. EAGAIN: there are too many */
create_thread_fn create_driver_thread; /* one of the CUDA driver's */
extern bool driver_seen;               /* the CUDA driver has started a thread */
bool is_exempt_thread(int tid, const struct task *task);
/* While this is true, an unknown thread may be an exempt one that has just started. Its creator cannot be parked
 * meanwhile. */
bool exempt_thread_starting(void);
void threads_forget(void);

/* signals.c: keeps the reserved signal for the shim. */
void signals_resolve(void);
void signals_guard(void);
void signals_install(void);

/* handler.c: called by the signal handler, on a thread of the job. */
void park_here(const void *context);

/* park.c */
int park(int64_t timeout_ns, bool outside_driver);
int release(int64_t timeout_ns);
void park_forget(void);

/* memory_calls.c: threads inside a call that changes the device memory which we back. */
void memory_enter(void);
void memory_leave(void);
bool memory_call_open(void);      /* in the calling thread */
uint32_t memory_calls_open(void); /* how many threads are inside one */
void memory_calls_delay(int64_t ns); /* new calls wait, at most for this long; calls that have begun continue */
void memory_calls_resume(void);
void memory_calls_forget(void);

/* thread_location.c: whether a thread may hold a lock of the allocator, the loader or the driver. */
enum place {
	PLACE_FREE,
	PLACE_DOUBTFUL,      /* it may hold a lock: try again a moment later */
	PLACE_DRIVER,      /* it runs inside the driver, and will leave it */
	PLACE_DRIVER_SLEEPS, /* it waits inside the driver: for the GPU, or until the driver is unlocked */
};
void places_find(void);
enum place place_in(const void *context);

/* probe.c */
int probe_start(void);
const char *probe_run(int64_t until_ns); /* the lock that is held, NULL: none */
const char *probe_settle(int64_t until_ns);
void probe_forget(void);

/* control.c */
void control_start(void);
void control_forget(void);
void control_leader_left(void);

/* tracking.c: the userfaultfd with which the daemon finds written pages, SNAPSHIM_TRACK_… */
int tracking_dispatch(uint32_t command);
int64_t tracking_wait_ns(void);
bool tracking_forget(void);

/* twin.c: SNAPSHIM_TWIN */
int twin(uint64_t life_ms);

/* nccl/real.c: whether the address is in NCCL's code. False until the job has called NCCL. */
bool nccl_contains(const void *address);

/* nccl/capture.c: whether any stream is being captured into a CUDA graph. */
bool captures_under_way(void);

/* nccl/rdma.c: in a forked child. */
void rdma_forget(void);

/* nccl/dispatch.c: the commands about NCCL, SNAPSHIM_NCCL_… */
int nccl_dispatch(uint32_t command, int64_t timeout_ns);
void nccl_forget(void);

/* loaded.c: libraries that the job has loaded, and CUDA's own functions in them. A library is known by how its file name
 * begins. */
#define CUDA_RUNTIME "libcudart.so"
#define CUDA_DRIVER "libcuda.so"
void *loaded_library(const char *begins); /* for dlsym; NULL: not loaded */
void *cuda_function(const char *name, const char *library_begins,
		    const void *caller); /* as the caller would have found it; or NULL */

/* memory/: device memory that we back, and the mailbox's commands about it, SNAPSHIM_MEMORY_… */
int memory_dispatch(uint32_t command, int64_t timeout_ns);
void memory_forget(void);
bool memory_has_thread(int tid); /* whether it is one of our threads that copy */
bool memory_is_ours(uint64_t address);
bool memory_lets_run(void); /* false: the job's memory is being replaced; otherwise that does not begin any more */
/* CUDA IPC of memory that we back, with our own handles; updates the mailbox's counts. False: the caller must call CUDA. */
bool memory_ipc_get(void *handle, uint64_t address);
bool memory_ipc_open(uint64_t *address, const void *handle, const void *caller,
		     int *status); /* of the runtime's call, or NULL */
bool memory_ipc_close(uint64_t address, int *status);
/* Likewise of events, which are always complete. They are not counted, because nothing has to be done for them in a move. */
bool memory_event_get(void *handle, void *event, int *status);
bool memory_event_open(void **event, const void *handle, const void *caller, int *status);
uint64_t
memory_share(uint64_t handle); /* the driver's own handle, for other processes; the memory is not offloaded from then on */

/* safepoint.c */
int empty_cache(int64_t timeout_ns);
void safepoint_forget(void);

#endif
