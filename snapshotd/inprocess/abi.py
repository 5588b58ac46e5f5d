"""The binary interface of libsnapshim.so. Generated from shim/lib/abi.h by tools/gen-abi; do not edit."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

ABI_VERSION = 4
SIGNAL = 61
EXEMPT_MAX = 64
STRIPES_MAX = 16
VISIBLE_BYTES = 512
SERVERS_MAX = 16
IPC_NOT_OFFERED = 1
IPC_NOT_OPEN = 2

_LAYOUT = struct.Struct("<8sIIiiiIII4QIIiI4Q512sQQQ64iQQII16QIi512sQQQQ16QII")
MAILBOX_BYTES = _LAYOUT.size


class Command(enum.IntEnum):
    PARK = 1
    RELEASE = 2
    EMPTY_CACHE = 3
    NCCL_ROOM = 16
    NCCL_CLOSE = 17
    NCCL_TARGETS = 18
    NCCL_REPORT = 19
    NCCL_OPEN = 20
    NCCL_DETACH = 21
    NCCL_NEW_ID = 22
    NCCL_FRESH = 23
    NCCL_ATTACH = 24
    NCCL_CLOSE_DEVICES = 25
    NCCL_DEVICES = 26
    MEMORY_OPEN = 32
    MEMORY_READY = 33
    MEMORY_OFFLOAD = 34
    MEMORY_FILL = 35
    MEMORY_DROP = 36
    MEMORY_HAND_OVER = 40
    MEMORY_TAKE_BACK = 41
    MEMORY_OWN = 42
    MEMORY_IPC_TRY = 43
    MEMORY_IPC_CLOSE = 44
    MEMORY_IPC_OFFER = 45
    MEMORY_IPC_OPEN = 46
    TRACK_OPEN = 48
    TRACK_CLOSE = 49
    TWIN = 50


class Offset(enum.IntEnum):
    """Where each member of the mailbox begins."""

    MAGIC = 0
    ABI = 8
    SIZE = 12
    OWNER = 16
    THREAD = 20
    PROBE = 24
    PARKED = 28
    PARKED_THREADS = 32
    COMMAND = 36
    ARGUMENT = 40
    REQUEST = 72
    ANSWER = 76
    STATUS = 80
    CANCEL = 84
    RESULT = 88
    TEXT = 120
    MANAGED_ALLOCATIONS = 632
    IPC_EXPORTS = 640
    IPC_IMPORTS = 648
    EXEMPT = 656
    DEVICE_BYTES = 912
    DEVICE_BLOCKS = 920
    DEVICE_OFFLOADED = 928
    DEVICE_STRIPES = 932
    DEVICE_DONE = 936
    DEVICE_CANCEL = 1064
    COUNTS = 1068
    VISIBLE = 1072
    DEVICE_IMPORTED = 1584
    IPC_EXPORTS_THAT_MOVE = 1592
    IPC_IMPORTS_THAT_MOVE = 1600
    IPC_SERVER = 1608
    IPC_OPENED_FROM = 1616
    IPC_CLOSED = 1744
    IPC_OUTSIDE = 1748


class MailboxFields(NamedTuple):
    """The mailbox as it was at one moment."""

    magic: bytes
    abi: int
    size: int
    owner: int
    thread: int
    probe: int
    parked: int
    parked_threads: int
    command: int
    argument: tuple[int, ...]
    request: int
    answer: int
    status: int
    cancel: int
    result: tuple[int, ...]
    text: bytes
    managed_allocations: int
    ipc_exports: int
    ipc_imports: int
    exempt: tuple[int, ...]
    device_bytes: int
    device_blocks: int
    device_offloaded: int
    device_stripes: int
    device_done: tuple[int, ...]
    device_cancel: int
    counts: int
    visible: bytes
    device_imported: int
    ipc_exports_that_move: int
    ipc_imports_that_move: int
    ipc_server: int
    ipc_opened_from: tuple[int, ...]
    ipc_closed: int
    ipc_outside: int


def unpack(raw: bytes) -> MailboxFields:
    values = _LAYOUT.unpack(raw)
    return MailboxFields(
        magic=values[0],
        abi=values[1],
        size=values[2],
        owner=values[3],
        thread=values[4],
        probe=values[5],
        parked=values[6],
        parked_threads=values[7],
        command=values[8],
        argument=values[9:13],
        request=values[13],
        answer=values[14],
        status=values[15],
        cancel=values[16],
        result=values[17:21],
        text=values[21],
        managed_allocations=values[22],
        ipc_exports=values[23],
        ipc_imports=values[24],
        exempt=values[25:89],
        device_bytes=values[89],
        device_blocks=values[90],
        device_offloaded=values[91],
        device_stripes=values[92],
        device_done=values[93:109],
        device_cancel=values[109],
        counts=values[110],
        visible=values[111],
        device_imported=values[112],
        ipc_exports_that_move=values[113],
        ipc_imports_that_move=values[114],
        ipc_server=values[115],
        ipc_opened_from=values[116:132],
        ipc_closed=values[132],
        ipc_outside=values[133],
    )
