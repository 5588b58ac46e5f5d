/* Every public NCCL symbol (2.18 to 2.32) that takes or returns a communicator, a registration or a user reduction.
 *
 * TO ADD A SYMBOL: a launched operation or a plain query needs one line in a list below and nothing else, as long as
 * every argument is a pointer or an integer. The wrapper takes and passes on one machine word per argument, which the
 * calling conventions of x86-64 and arm64 allow. Anything else (a handle is created, a struct passed by value) needs a
 * function in its subject's file, and one line in NCCL_WRITTEN. tests/shim/nccl/test_symbols.py compares with headers.
 *
 * Windows are not virtualised, because a communicator with a window is refused. So functions that take a window and no
 * communicator are not listed.
 */
#ifndef SNAPSHIM_NCCL_SYMBOLS_H
#define SNAPSHIM_NCCL_SYMBOLS_H

/* Launched on a stream, through the gate: name, words, what it counts as, and the positions of the communicator (the stream
 * follows it), the reduction, the peer and the config among the arguments, -1 if there is none. */
#define NCCL_LAUNCHED(X)                                    \
	X(ncclAllReduce, 7, COLLECTIVE, 5, 4, -1, -1)           \
	X(ncclBroadcast, 7, COLLECTIVE, 5, -1, -1, -1)          \
	X(ncclBcast, 6, COLLECTIVE, 4, -1, -1, -1)              \
	X(ncclReduce, 8, COLLECTIVE, 6, 4, -1, -1)              \
	X(ncclAllGather, 6, COLLECTIVE, 4, -1, -1, -1)          \
	X(ncclReduceScatter, 7, COLLECTIVE, 5, 4, -1, -1)       \
	X(ncclAlltoAll, 6, COLLECTIVE, 4, -1, -1, -1)           \
	X(ncclGather, 7, COLLECTIVE, 5, -1, -1, -1)             \
	X(ncclScatter, 7, COLLECTIVE, 5, -1, -1, -1)            \
	X(ncclAllReduceConfig, 8, COLLECTIVE, 5, 4, -1, 7)      \
	X(ncclBroadcastConfig, 8, COLLECTIVE, 5, -1, -1, 7)     \
	X(ncclReduceConfig, 9, COLLECTIVE, 6, 4, -1, 8)         \
	X(ncclAllGatherConfig, 7, COLLECTIVE, 4, -1, -1, 6)     \
	X(ncclReduceScatterConfig, 8, COLLECTIVE, 5, 4, -1, 7)  \
	X(ncclAlltoAllConfig, 7, COLLECTIVE, 4, -1, -1, 6)      \
	X(ncclGatherConfig, 8, COLLECTIVE, 5, -1, -1, 7)        \
	X(ncclScatterConfig, 8, COLLECTIVE, 5, -1, -1, 7)       \
	X(ncclSend, 6, SEND, 4, -1, 3, -1)                      \
	X(ncclRecv, 6, RECEIVE, 4, -1, 3, -1)                   \
	X(ncclPutSignal, 11, SIGNAL, 9, -1, 3, -1)              \
	X(ncclSignal, 6, SIGNAL, 4, -1, 0, -1)                  \
	X(ncclWaitSignal, 4, WAIT_SIGNAL, 2, -1, -1, -1)

/* Collective, on no stream: name, words, the communicator's position, and why the communicator is refused from then on. */
#define NCCL_REFUSED(X)                                     \
	X(ncclCommWindowRegister, 5, 0, REFUSED_WINDOW)         \
	X(ncclDevCommCreate, 3, 0, REFUSED_DEVICE_COMM)

/* Passed to the real communicator at once, regardless of the gate: name, words, the communicator's position, and why the
 * communicator is refused from then on, 0 if it is not. */
#define NCCL_ASKED(X)                                       \
	X(ncclCommWindowDeregister, 2, 0, 0)                    \
	X(ncclDevCommDestroy, 2, 0, 0)                          \
	X(ncclWinGetUserPtr, 3, 0, 0)                           \
	X(ncclCommQueryProperties, 2, 0, 0)                     \
	X(ncclCommMemStats, 3, 0, 0)                            \
	X(ncclCommGetUniqueId, 2, 0, REFUSED_GROWN)             \
	X(ncclCommSuspend, 2, 0, REFUSED_SUSPENDED)             \
	X(ncclCommResume, 1, 0, 0)                              \
	X(ncclCommRevoke, 2, 0, REFUSED_REVOKED)

/* Written out. */
#define NCCL_WRITTEN(X)                                                                        \
	X(ncclGetVersion) X(ncclGetUniqueId) X(ncclGetLastError) X(ncclMemAlloc) X(ncclMemFree)    \
	X(ncclGroupStart) X(ncclGroupEnd) X(ncclGroupSimulateEnd)                                  \
	X(ncclCommInitRank) X(ncclCommInitRankConfig) X(ncclCommInitRankScalable)                  \
	X(ncclCommInitAll) X(ncclCommSplit) X(ncclCommShrink) X(ncclCommGrow)                      \
	X(ncclCommFinalize) X(ncclCommDestroy) X(ncclCommAbort)                                    \
	X(ncclCommGetAsyncError) X(ncclCommCount) X(ncclCommCuDevice) X(ncclCommUserRank)          \
	X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy) X(ncclCommRegister) X(ncclCommDeregister)  \
	X(ncclTeamWorld) X(ncclTeamLsa) X(ncclTeamRail) X(ncclTeamCft) X(ncclTeamCftMultimem)      \
	X(ncclTeamRankToWorld) X(ncclTeamRankToLsa) X(ncclGinBarrierCreateRequirement)

enum nccl_symbol_index {
#define X(name, ...) SYMBOL_##name,
	NCCL_LAUNCHED(X) NCCL_REFUSED(X) NCCL_ASKED(X) NCCL_WRITTEN(X)
#undef X
		SYMBOLS,
};

#endif
