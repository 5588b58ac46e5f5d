"""Calls NCCL's C interface from Python, for the tests of the fake.

The table has one row for each exported function, in the order of NCCL's header. A call is ``nccl.ncclAllReduce(...)``.
It releases the GIL. A result other than success is raised, with NCCL's error message. A symbol that the library lacks
raises ``AttributeError``. Only the symbols at the end of the table are specific to the fake, so the shim's tests use it
as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

UNIQUE_ID_BYTES = 128
UNDEFINED = -(2**31)
CONFIG_MAGIC = 0xCAFEBEEF
SIM_INFO_MAGIC = 0x74685283
NO_COLOR = -1


class Result(IntEnum):
    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7


class Operator(IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class NcclFailed(Exception):
    """A call returned a result other than success."""

    def __init__(self, call: str, result: Result, reason: str) -> None:
        super().__init__(f"{call}: {result.name}: {reason}")
        self.result = result
        self.reason = reason


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t of 2.28; a caller of an older version gives a smaller ``size``."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
        ("nChannelsPerNetPeer", c_int),
        ("nvlinkCentricSched", c_int),
    )


class SimInfo(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("estimatedTime", c_float))


def config(*, blocking: bool = True, name: str | None = None, size: int | None = None) -> Config:
    made = Config(ctypes.sizeof(Config) if size is None else size, CONFIG_MAGIC, 22809)
    for field, kind in Config._fields_[3:]:
        if kind is c_int:
            setattr(made, field, UNDEFINED)
    made.blocking = int(blocking)
    made.commName = name.encode() if name else None
    return made


_comm, _stream, _buffer = c_void_p, c_void_p, c_void_p
_type = _op = c_int

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # (void** ptr, size_t size) and (void* ptr)
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (c_void_p,),
    # (int* version)
    "ncclGetVersion": (POINTER(c_int),),
    # (ncclUniqueId* id)
    "ncclGetUniqueId": (POINTER(UniqueId),),
    # (ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config)
    "ncclCommInitRankConfig": (POINTER(_comm), c_int, UniqueId, c_int, POINTER(Config)),
    # (ncclComm_t* comm, int nranks, ncclUniqueId id, int rank)
    "ncclCommInitRank": (POINTER(_comm), c_int, UniqueId, c_int),
    # (ncclComm_t* comms, int ndev, const int* devlist)
    "ncclCommInitAll": (POINTER(_comm), c_int, POINTER(c_int)),
    "ncclCommFinalize": (_comm,),
    "ncclCommDestroy": (_comm,),
    "ncclCommAbort": (_comm,),
    # (ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t* config)
    "ncclCommSplit": (_comm, c_int, c_int, POINTER(_comm), POINTER(Config)),
    # (ncclComm_t comm, int* exclude, int count, ncclComm_t* child, ncclConfig_t* config, int flags)
    "ncclCommShrink": (_comm, POINTER(c_int), c_int, POINTER(_comm), POINTER(Config), c_int),
    # (ncclComm_t* comm, int nranks, int rank, int nId, ncclUniqueId* ids, ncclConfig_t* config)
    "ncclCommInitRankScalable": (POINTER(_comm), c_int, c_int, c_int, POINTER(UniqueId), POINTER(Config)),
    # (ncclComm_t comm, ncclResult_t* state)
    "ncclCommGetAsyncError": (_comm, POINTER(c_int)),
    "ncclCommCount": (_comm, POINTER(c_int)),
    "ncclCommCuDevice": (_comm, POINTER(c_int)),
    "ncclCommUserRank": (_comm, POINTER(c_int)),
    # (ncclComm_t comm, void* buff, size_t size, void** handle)
    "ncclCommRegister": (_comm, _buffer, c_size_t, POINTER(c_void_p)),
    "ncclCommDeregister": (_comm, c_void_p),
    # (ncclComm_t comm, void* buff, size_t size, ncclWindow_t* window, int flags)
    "ncclCommWindowRegister": (_comm, _buffer, c_size_t, POINTER(c_void_p), c_int),
    "ncclCommWindowDeregister": (_comm, c_void_p),
    # (ncclComm_t comm, const ncclDevCommRequirements_t*, ncclDevComm_t*)
    "ncclDevCommCreate": (_comm, c_void_p, c_void_p),
    "ncclDevCommDestroy": (_comm, c_void_p),
    # (ncclRedOp_t* op, void* scalar, ncclDataType_t, ncclScalarResidence_t, ncclComm_t)
    "ncclRedOpCreatePreMulSum": (POINTER(_op), c_void_p, _type, c_int, _comm),
    "ncclRedOpDestroy": (_op, _comm),
    # (sendbuff, recvbuff, count, type, op, root, comm, stream)
    "ncclReduce": (_buffer, _buffer, c_size_t, _type, _op, c_int, _comm, _stream),
    # (buff, count, type, root, comm, stream)
    "ncclBcast": (_buffer, c_size_t, _type, c_int, _comm, _stream),
    # (sendbuff, recvbuff, count, type, root, comm, stream)
    "ncclBroadcast": (_buffer, _buffer, c_size_t, _type, c_int, _comm, _stream),
    # (sendbuff, recvbuff, count, type, op, comm, stream)
    "ncclAllReduce": (_buffer, _buffer, c_size_t, _type, _op, _comm, _stream),
    "ncclReduceScatter": (_buffer, _buffer, c_size_t, _type, _op, _comm, _stream),
    # (sendbuff, recvbuff, count, type, comm, stream)
    "ncclAllGather": (_buffer, _buffer, c_size_t, _type, _comm, _stream),
    "ncclAlltoAll": (_buffer, _buffer, c_size_t, _type, _comm, _stream),
    # (sendbuff, recvbuff, count, type, root, comm, stream)
    "ncclGather": (_buffer, _buffer, c_size_t, _type, c_int, _comm, _stream),
    "ncclScatter": (_buffer, _buffer, c_size_t, _type, c_int, _comm, _stream),
    # (buff, count, type, peer, comm, stream)
    "ncclSend": (_buffer, c_size_t, _type, c_int, _comm, _stream),
    "ncclRecv": (_buffer, c_size_t, _type, c_int, _comm, _stream),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclGroupSimulateEnd": (POINTER(SimInfo),),
    # Symbols of the fake only, where streams are opaque keys.
    "fakeNcclStreamSynchronize": (_stream,),
    "fakeNcclStreamQuery": (_stream,),
    "fakeNcclSetDevice": (c_int,),
}


class Nccl:
    """One loaded copy of the library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.ncclGetErrorString.restype = c_char_p
        self.library.ncclGetLastError.restype = c_char_p
        self.library.ncclGetLastError.argtypes = (_comm,)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The function of that name, which raises NcclFailed."""
        if name not in FUNCTIONS:
            raise AttributeError(name)
        function = getattr(self.library, name)
        function.argtypes = FUNCTIONS[name]

        def call(*arguments: Any) -> None:
            result = Result(function(*arguments))
            if result is not Result.SUCCESS:
                raise NcclFailed(name, result, self.last_error())

        return call

    def result_of(self, call: Callable[..., object], *arguments: Any) -> Result:
        try:
            call(*arguments)
        except NcclFailed as failure:
            return failure.result
        return Result.SUCCESS

    def last_error(self, comm: c_void_p | None = None) -> str:
        return bytes(self.library.ncclGetLastError(comm)).decode()

    def version(self) -> int:
        number = c_int()
        self.ncclGetVersion(ctypes.byref(number))
        return number.value

    def unique_id(self) -> UniqueId:
        made = UniqueId()
        self.ncclGetUniqueId(ctypes.byref(made))
        return made

    def init_rank(self, nranks: int, unique_id: UniqueId, rank: int, settings: Config | None = None) -> c_void_p:
        """Returns the new communicator; a non-blocking one is still in progress."""
        comm = c_void_p()
        try:
            if settings is None:
                self.ncclCommInitRank(ctypes.byref(comm), nranks, unique_id, rank)
            else:
                self.ncclCommInitRankConfig(ctypes.byref(comm), nranks, unique_id, rank, ctypes.byref(settings))
        except NcclFailed as failure:
            if failure.result is not Result.IN_PROGRESS:
                raise
        return comm

    def split(self, comm: c_void_p, color: int, key: int, settings: Config | None = None) -> c_void_p:
        child = c_void_p()
        self.ncclCommSplit(comm, color, key, ctypes.byref(child), ctypes.byref(settings) if settings else None)
        return child

    def shrink(self, comm: c_void_p, excluded: list[int], flags: int = 0) -> c_void_p:
        child = c_void_p()
        self.ncclCommShrink(comm, (c_int * len(excluded))(*excluded), len(excluded), ctypes.byref(child), None, flags)
        return child

    def async_error(self, comm: c_void_p) -> Result:
        state = c_int()
        self.ncclCommGetAsyncError(comm, ctypes.byref(state))
        return Result(state.value)

    def ask(self, question: str, comm: c_void_p) -> int:
        """Calls ncclCommCount, ncclCommUserRank or ncclCommCuDevice."""
        answer = c_int()
        getattr(self, question)(comm, ctypes.byref(answer))
        return answer.value
