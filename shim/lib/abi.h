/* The binary interface of libsnapshim.so, of libsnapshim-offload.so, which is the same with memory/, and of
 * libsnapshim-shared.so, which is that with sharing/. Raise the version when the interface changes. tools/gen-abi makes
 * snapshotd/inprocess/abi.py from this file.
 *
 * The daemon writes its commands into `snapshim_mailbox`, in the process's own memory, and wakes its control thread with
 * the reserved signal. So there is no descriptor that a dump would have to carry.
 */
#ifndef SNAPSHIM_ABI_H
#define SNAPSHIM_ABI_H

#include <stdint.h>

#define SNAPSHIM_ABI_VERSION 4

#define SNAPSHIM_SIGNAL 61 /* SIGRTMAX - 3: parks the job's threads, wakes the control thread */
#define SNAPSHIM_EXEMPT_MAX 64
#define SNAPSHIM_STRIPES_MAX 16
#define SNAPSHIM_VISIBLE_BYTES 512
#define SNAPSHIM_SERVERS_MAX 16

/* Bits of `ipc_closed` */
#define SNAPSHIM_IPC_NOT_OFFERED 1
#define SNAPSHIM_IPC_NOT_OPEN 2

#define SNAPSHIM_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum snapshim_command {
	/* argument[0]: milliseconds; [1]: 0: the driver is locked, and threads that wait for it are parked there; 1: no
	 * thread is parked inside the driver; one that seems to sleep there is parked only in the second half of the time.
	 * EBUSY: some threads stay inside the driver */
	SNAPSHIM_PARK = 1,
	SNAPSHIM_RELEASE = 2,     /* argument[0]: milliseconds */
	/* argument[0]: milliseconds; result[0]: bytes that torch has released, [1]: pools of compilers that were told to end their
	 * workers */
	SNAPSHIM_EMPTY_CACHE = 3,

	/* NCCL: argument[0]: milliseconds; argument[1]: bytes of the request's text, in the buffer that NCCL_ROOM
	 * returned; result[0] and [1]: address and bytes of the answer's text. shim/README.md describes the formats. */
	SNAPSHIM_NCCL_ROOM = 16, /* argument[1]: bytes wanted; result[0]: the buffer's address */
	SNAPSHIM_NCCL_CLOSE = 17,
	SNAPSHIM_NCCL_TARGETS = 18,
	SNAPSHIM_NCCL_REPORT = 19,
	SNAPSHIM_NCCL_OPEN = 20,
	SNAPSHIM_NCCL_DETACH = 21,
	SNAPSHIM_NCCL_NEW_ID = 22,
	SNAPSHIM_NCCL_FRESH = 23,
	SNAPSHIM_NCCL_ATTACH = 24,
	SNAPSHIM_NCCL_CLOSE_DEVICES = 25, /* of RDMA; an older library does not know it */
	SNAPSHIM_NCCL_DEVICES = 26,

	/* Device memory that the shim backs, in libsnapshim-offload.so (shim/README.md, "Device memory"); ENOSYS in the
	 * other. argument[0]: milliseconds. */
	SNAPSHIM_MEMORY_OPEN = 32, /* result[0]: a descriptor: the daemon's socket of a fresh pair, [1]: its inode */
	/* argument[1]: stripes, [2]: bytes of a slot, [3]: 1: for HAND_OVER or TAKE_BACK, which need no files, and keep the socket;
	 * result[0]: bytes that OFFLOAD or FILL will copy */
	SNAPSHIM_MEMORY_READY = 33,
	SNAPSHIM_MEMORY_OFFLOAD = 34, /* only while the job is parked; result[0]: bytes, [1]: nanoseconds of copying */
	SNAPSHIM_MEMORY_FILL = 35, /* result as of OFFLOAD */
	SNAPSHIM_MEMORY_DROP = 36, /* releases what OPEN and READY made */
	/* Instead of OFFLOAD: sends descriptors of the physical memory over the socket, and releases it once the daemon has
	 * answered with a byte; result[0]: bytes. EXDEV: some of it cannot be exported, and nothing was released. An older
	 * library does not know these three; 37 to 39 were such commands without an answer */
	SNAPSHIM_MEMORY_HAND_OVER = 40,
	/* Instead of FILL: maps the memory whose descriptors come over the socket; argument[1]: how many */
	SNAPSHIM_MEMORY_TAKE_BACK = 41,
	/* Replaces what TAKE_BACK has mapped by memory of this process, while the job is parked. Where nothing is imported it
	 * does nothing, also without READY */
	SNAPSHIM_MEMORY_OWN = 42,
	/* Memory that processes share (CUDA IPC), without READY, in libsnapshim-shared.so. An older library does not know these.
	 * IPC_TRY makes once what IPC_CLOSE and IPC_OPEN will do, and closes nothing. While the job runs it starts the thread for
	 * it; while it is parked, processes of other ranks get nothing from then on until RELEASE. EAGAIN: as of OFFLOAD; ENOENT:
	 * the owner of memory that is open here has freed it, or has ended; EXDEV: another rank has memory of this process */
	SNAPSHIM_MEMORY_IPC_TRY = 43,
	SNAPSHIM_MEMORY_IPC_CLOSE = 44, /* only while the job is parked: unmaps all memory of other processes */
	SNAPSHIM_MEMORY_IPC_OFFER = 45, /* offers memory that came back to other processes, under its former handles */
	/* Maps what other processes offer at its former addresses. ENOENT: one does not offer it */
	SNAPSHIM_MEMORY_IPC_OPEN = 46,

	/* Finding written pages. An older library knows neither. */
	SNAPSHIM_TRACK_OPEN = 48, /* result[0]: a userfaultfd of this process, until TRACK_CLOSE, at most some seconds */
	SNAPSHIM_TRACK_CLOSE = 49, /* the daemon has taken its copy. Idempotent */

	/* Makes a process that has this one's memory as it is now, and does nothing. argument[1]: milliseconds after which it
	 * ends by itself; result[0]: its pid. An older library does not know it */
	SNAPSHIM_TWIN = 50,
};

/* With each descriptor comes one of these. HAND_OVER sends a last one without a descriptor. */
struct snapshim_held_block {
	uint64_t address, bytes; /* bytes: 0: the last */
	int32_t device; /* as the process numbers them */
	uint32_t unused;
};

/* Pids and thread ids are those of the process's own pid namespace. The daemon writes command, argument and, last,
 * request. */
struct snapshim_mailbox {
	char magic[8]; /* SNAPSHIM */
	uint32_t abi;
	uint32_t size; /* of this struct, in bytes */
	int32_t owner; /* the process that the control thread belongs to; in a forked child's copy its parent, or 0 */
	int32_t thread; /* the control thread */
	int32_t probe; /* the thread that tries the allocator's and the loader's locks; 0 before the first PARK */
	uint32_t parked; /* 1: no thread of the job runs */
	uint32_t parked_threads; /* how many threads are parked */
	uint32_t command;
	uint64_t argument[4];
	uint32_t request; /* the number of the last request; it differs from `answer` until the request is done */
	uint32_t answer; /* the number of the last request that was done */
	int32_t status; /* of that request: 0 or an errno */
	/* written by the daemon: the number of an NCCL request to cancel before its deadline; it is still answered */
	uint32_t cancel;
	uint64_t result[4];
	char text[512]; /* of that request: the error's text */
	uint64_t managed_allocations;
	uint64_t ipc_exports; /* handles that were exported; of memory that the shim backs, until it is freed */
	uint64_t ipc_imports; /* memory handles that were opened and not closed, and event handles */
	/* the driver's threads and ours, which are never parked; 0: free, -1: starting */
	int32_t exempt[SNAPSHIM_EXEMPT_MAX];
	uint64_t device_bytes; /* of device memory that the shim backs now */
	uint64_t device_blocks;
	uint32_t device_offloaded; /* 1: its content is in stripes, its physical memory released */
	uint32_t device_stripes; /* of the last MEMORY_READY */
	/* bytes of each stripe that are in its file (OFFLOAD) or back on the device (FILL) */
	uint64_t device_done[SNAPSHIM_STRIPES_MAX];
	/* written by the daemon: while it is 1, READY, OFFLOAD and FILL give up with ECANCELED */
	uint32_t device_cancel;
	/* bytes from the mailbox to `struct snapshim_counts`; 0: no communicator was created yet, or an older library */
	int32_t counts;
	/* CUDA_VISIBLE_DEVICES when the CUDA driver started its first thread: '=' and the value, or '-' if it was not set; 0: not
	 * seen, or longer. The mailbox of an older library ends before */
	char visible[SNAPSHIM_VISIBLE_BYTES];
	/* blocks of device memory that another process created (TAKE_BACK), until OWN, HAND_OVER or OFFLOAD. The mailbox of an older
	 * library ends before, and counts them in ipc_imports */
	uint64_t device_imported;
	/* Of ipc_exports and ipc_imports those that can move: OFFLOAD and HAND_OVER take the memory, IPC_CLOSE and IPC_OPEN the
	 * handles. The mailbox of an older library ends before */
	uint64_t ipc_exports_that_move;
	uint64_t ipc_imports_that_move;
	uint64_t ipc_server; /* that offers what is exported here; 0: none */
	uint64_t ipc_opened_from[SNAPSHIM_SERVERS_MAX]; /* the servers of what was opened; 0: free */
	uint32_t ipc_closed; /* not 0: shared memory is closed or not offered, and no thread of the job may run */
	uint32_t ipc_outside; /* not 0: a process outside this one's cgroup has got something that is exported here */
};

/* Where the counts of NCCL operations are, for a daemon that only reads them (snapshotd/inprocess/counts.py): no thread of the
 * process is woken, and no call of NCCL does more than it would without. It describes the records, so that it need not change
 * with them. */
struct snapshim_counts {
	uint32_t version; /* 1 */
	uint32_t record_bytes;
	/* where these members are in a record: u64, i32, i32, i32, u64, and the address of the counts by peer (0: none) */
	uint32_t at_id, at_state, at_nranks, at_rank, at_collectives, at_peers;
	/* counts by peer: an i32, how many there are, and from at_with on for each of them two u64, sent and received */
	uint32_t live, at_with; /* `live`: the state of a record that is in use */
	uint64_t records; /* address of the first */
	uint64_t used; /* how many were ever used; those that are not in use any more have another state than `live` */
};

SNAPSHIM_EXPORT extern struct snapshim_mailbox snapshim_mailbox;

/* The version that the library was built with. Other code can detect the library and its version by this symbol. */
SNAPSHIM_EXPORT extern const unsigned int snapshim_abi_version;

/* libc's syscall(2) wrapper, interposed: io_uring_setup answers ENOSYS, a request for AMX tiles EOPNOTSUPP; every other
 * call passes. */
SNAPSHIM_EXPORT long syscall(long number, ...);

/* Interposed as well, each with its own library's prototype:
 *   pthread_create pthread_exit thrd_exit __cxa_atexit
 *   sigaction signal sigprocmask pthread_sigmask pthread_attr_setsigmask_np
 *   sigsuspend sigwait sigwaitinfo sigtimedwait signalfd ppoll __ppoll_chk pselect epoll_pwait epoll_pwait2
 *   cudaMallocManaged cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle
 *   cudaIpcGetEventHandle cudaIpcOpenEventHandle
 *   cuMemAllocManaged cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
 *   cuIpcGetEventHandle cuIpcOpenEventHandle cuMemExportToShareableHandle cuMemImportFromShareableHandle
 *   cudaStreamBeginCapture cudaStreamBeginCapture_ptsz cudaStreamBeginCaptureToGraph cudaStreamBeginCaptureToGraph_ptsz
 *   cudaStreamEndCapture cudaStreamEndCapture_ptsz
 *   dlvsym ibv_open_device ibv_close_device ibv_get_async_event
 */

/* And by libsnapshim-offload.so and libsnapshim-shared.so:
 *   cudaMalloc cudaFree cudaFreeAsync cudaFreeAsync_ptsz cudaDeviceReset
 *   cudaDeviceEnablePeerAccess cudaDeviceDisablePeerAccess
 *   cudaGetDriverEntryPoint cudaGetDriverEntryPoint_ptsz
 *   cudaGetDriverEntryPointByVersion cudaGetDriverEntryPointByVersion_ptsz
 *   cuMemAlloc_v2 cuMemFree_v2 cuMemFreeAsync cuMemFreeAsync_ptsz cuMemGetHandleForAddressRange
 *   cuDevicePrimaryCtxReset_v2 cuCtxDestroy_v2 cuCtxEnablePeerAccess cuCtxDisablePeerAccess
 */

/* And by libsnapshim-shared.so alone:
 *   cudaEventCreateWithFlags cudaEventDestroy cudaEventRecord cudaEventRecord_ptsz
 *   cudaEventRecordWithFlags cudaEventRecordWithFlags_ptsz
 *   cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventRecord_ptsz cuEventRecordWithFlags cuEventRecordWithFlags_ptsz
 */

/* And every symbol of nccl/symbols.h, also by its profiling name (pnccl…). */

#ifdef __cplusplus
}
#endif

#endif
