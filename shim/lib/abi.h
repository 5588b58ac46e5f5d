/* What libsnapshim.so promises to the rest of the product, and libsnapshim-offload.so, which is the same with memory/. Raise the
 * version when a promise changes.
 *
 * The daemon speaks to a process through `snapshim_mailbox`, in the process's own memory, and wakes its control thread with
 * the reserved signal; so there is no descriptor that a dump would have to carry. snapshotd/inprocess/shimctl.py is the other side.
 */
#ifndef SNAPSHIM_ABI_H
#define SNAPSHIM_ABI_H

#include <stdint.h>

#define SNAPSHIM_ABI_VERSION 4

#define SNAPSHIM_SIGNAL 61 /* SIGRTMAX - 3: parks the job's threads, wakes the control thread */
#define SNAPSHIM_EXEMPT_MAX 64
#define SNAPSHIM_STRIPES_MAX 16

#define SNAPSHIM_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum snapshim_command {
	SNAPSHIM_PARK = 1,        /* argument[0]: milliseconds; [1]: 0: the driver is locked, whoever waits for it is parked there;
				   * 1: nobody is parked inside the driver, or seems to sleep there for half the time. EBUSY: some stay */
	SNAPSHIM_RELEASE = 2,     /* argument[0]: milliseconds */
	SNAPSHIM_EMPTY_CACHE = 3, /* argument[0]: milliseconds; result[0]: bytes given back */

	/* NCCL: argument[0]: milliseconds; argument[1]: bytes of text that were written into the room; result[0] and [1]:
	 * address and bytes of the answer's text. shim/README.md has the formats. */
	SNAPSHIM_NCCL_ROOM = 16, /* argument[1]: bytes wanted; result[0]: the room's address */
	SNAPSHIM_NCCL_CLOSE = 17,
	SNAPSHIM_NCCL_TARGETS = 18,
	SNAPSHIM_NCCL_REPORT = 19,
	SNAPSHIM_NCCL_OPEN = 20,
	SNAPSHIM_NCCL_DETACH = 21,
	SNAPSHIM_NCCL_NEW_ID = 22,
	SNAPSHIM_NCCL_FRESH = 23,
	SNAPSHIM_NCCL_ATTACH = 24,

	/* Device memory that we back, in libsnapshim-offload.so (shim/README.md, "Device memory"); ENOSYS in the other.
	 * argument[0]: milliseconds. */
	SNAPSHIM_MEMORY_OPEN = 32,  /* result[0]: a descriptor, the daemon's end of a fresh pair of sockets */
	SNAPSHIM_MEMORY_READY = 33, /* argument[1]: stripes, [2]: bytes of a slot; result[0]: bytes that PARK or FILL will copy */
	SNAPSHIM_MEMORY_OFFLOAD = 34,  /* only while the job is parked; result[0]: bytes, [1]: nanoseconds of copying */
	SNAPSHIM_MEMORY_FILL = 35,  /* result as of PARK */
	SNAPSHIM_MEMORY_DROP = 36,  /* gives up what OPEN and READY made */
};

/* Pids and thread ids are those of the process's own pid namespace. The daemon writes command, argument and, last, request. */
struct snapshim_mailbox {
	char magic[8];           /* SNAPSHIM */
	uint32_t abi;
	uint32_t size;           /* of this struct, in bytes */
	int32_t owner;           /* the process that the control thread belongs to; a forked child's copy names its parent, or 0 */
	int32_t thread;          /* the control thread */
	int32_t probe;           /* the thread that tries the allocator's and the loader's locks, 0 before the first PARK */
	uint32_t parked;         /* 1: no thread of the job runs */
	uint32_t parked_threads; /* how many that are */
	uint32_t command;
	uint64_t argument[4];
	uint32_t request;        /* a number that differs from `answer`: there is something to do */
	uint32_t answer;         /* the last request that was done */
	int32_t status;          /* of that: 0 or an errno */
	uint32_t cancel;         /* the daemon's: the request, one of NCCL's, that is to be given up before its time; it is answered as ever */
	uint64_t result[4];
	char text[512];          /* of that: words for the error */
	uint64_t managed_allocations;
	uint64_t ipc_exports;    /* handles that were given out; of memory that we allocated, until it is freed */
	uint64_t ipc_imports;    /* memory handles that were opened and not closed, and event handles */
	int32_t exempt[SNAPSHIM_EXEMPT_MAX]; /* the driver's own threads, and ours: never parked; 0: free */
	uint64_t device_bytes;   /* of device memory that is backed by us, now */
	uint64_t device_blocks;
	uint32_t device_offloaded;  /* 1: its content is in stripes, its physical memory released */
	uint32_t device_stripes; /* of the last MEMORY_READY */
	uint64_t device_done[SNAPSHIM_STRIPES_MAX]; /* bytes of each stripe that are in its file (PARK) or back on the device (FILL) */
	uint32_t device_cancel;  /* the daemon's alone: while it is 1, READY, PARK and FILL give up with ECANCELED */
	uint32_t device_unused;
};

SNAPSHIM_EXPORT extern struct snapshim_mailbox snapshim_mailbox;

/* The version the library was built with; how others see that it is in a process, and which one. */
SNAPSHIM_EXPORT extern const unsigned int snapshim_abi_version;

/* libc's syscall(2) wrapper, interposed: io_uring_setup answers ENOSYS, a request for AMX tiles EOPNOTSUPP, all else passes. */
SNAPSHIM_EXPORT long syscall(long number, ...);

/* Interposed as well, each with its own library's prototype:
 *   pthread_create pthread_exit thrd_exit
 *   sigaction signal sigprocmask pthread_sigmask pthread_attr_setsigmask_np
 *   sigsuspend sigwait sigwaitinfo sigtimedwait signalfd ppoll __ppoll_chk pselect epoll_pwait epoll_pwait2
 *   cudaMallocManaged cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle
 *   cudaIpcGetEventHandle cudaIpcOpenEventHandle
 *   cuMemAllocManaged cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
 *   cuIpcGetEventHandle cuIpcOpenEventHandle cuMemExportToShareableHandle cuMemImportFromShareableHandle
 *   cudaStreamBeginCapture cudaStreamBeginCapture_ptsz cudaStreamBeginCaptureToGraph cudaStreamBeginCaptureToGraph_ptsz
 *   cudaStreamEndCapture cudaStreamEndCapture_ptsz
 */

/* And by libsnapshim-offload.so alone:
 *   cudaMalloc cudaFree cudaFreeAsync cudaFreeAsync_ptsz cudaDeviceReset
 *   cudaDeviceEnablePeerAccess cudaDeviceDisablePeerAccess
 *   cudaGetDriverEntryPoint cudaGetDriverEntryPoint_ptsz
 *   cudaGetDriverEntryPointByVersion cudaGetDriverEntryPointByVersion_ptsz
 *   cuMemAlloc_v2 cuMemFree_v2 cuMemFreeAsync cuMemFreeAsync_ptsz cuMemGetHandleForAddressRange
 *   cuDevicePrimaryCtxReset_v2 cuCtxDestroy_v2 cuCtxEnablePeerAccess cuCtxDisablePeerAccess
 */

/* And every symbol of nccl/symbols.h, also by its profiling name (pnccl…). */

#ifdef __cplusplus
}
#endif

#endif
