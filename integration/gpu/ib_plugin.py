"""Uses the InfiniBand plugin of the machine's real NCCL without a GPU, and prints what it did.

    LD_LIBRARY_PATH=tests/fakes/verbs/build/plain python3 -m integration.gpu.ib_plugin LIBRARY init
    ...                                                                               LIBRARY data [END]

The plugin is a table of functions inside libnccl.so.2 that is not exported, so it is found in the symbol table. `init` calls
the function with which every communicator chooses its network. `data` connects the process with itself and sends data; with
END it then waits until this file exists. The layouts here are those of NCCL 2.28.9.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable
from ctypes import addressof, c_int, c_size_t, c_uint64, c_void_p
from functools import partial
from pathlib import Path

VERSION = 22809
CHOOSE_NETWORK = "_Z11ncclNetInitP8ncclComm"
LOG = "_Z12ncclDebugLog17ncclDebugLogLevelmPKciS1_z"
TABLE = "ncclNetIb"
#: ncclNet_v11_t, after the name: the functions and the types of their parameters.
FUNCTIONS: dict[str, tuple[type, ...]] = {
    "init": (c_void_p, c_uint64, c_void_p, c_void_p, c_void_p),
    "devices": (c_void_p,),
    "getProperties": (c_int, c_void_p),
    "listen": (c_void_p, c_int, c_void_p, c_void_p),
    "connect": (c_void_p, c_int, c_void_p, c_void_p, c_void_p),
    "accept": (c_void_p, c_void_p, c_void_p),
    "regMr": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "regMrDmaBuf": (),
    "deregMr": (c_void_p, c_void_p),
    "isend": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p, c_void_p),
    "irecv": (c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "iflush": (c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p),
    "test": (c_void_p, c_void_p, c_void_p),
    "closeSend": (c_void_p,),
    "closeRecv": (c_void_p,),
    "closeListen": (c_void_p,),
}
SHARED_OF_COMM = 0x88  # ncclComm.sharedRes
COMM_BYTES = 4 << 20  # more than ncclComm and ncclSharedResources have
HOST_MEMORY = 1
HANDLE_BYTES, RECEIVES_MAX = 128, 8
BUFFER_BYTES = 1 << 20
LIMIT_S = 60.0


def symbols(path: Path, wanted: set[str]) -> dict[str, int]:
    """The addresses of these names in the symbol table of a 64-bit library."""
    with path.open("rb") as file:
        header = struct.unpack("<16sHHIQQQIHHHHHH", file.read(64))
        file.seek(header[6])
        sections = [struct.unpack("<IIQQQQIIQQ", file.read(64)) for _ in range(header[12])]
        table = next(section for section in sections if section[1] == 2)  # SHT_SYMTAB
        names = sections[table[6]]
        file.seek(names[4])
        texts = file.read(names[5])
        file.seek(table[4])
        found = {}
        for name, _, _, _, value, _ in struct.iter_unpack("<IBBHQQ", file.read(table[5])):
            text = texts[name : texts.index(b"\0", name)].decode()
            if text in wanted:
                found[text] = value
    return found


class Plugin:
    """The functions of the table. Each call must return 0."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        version = c_int()
        # With the shim preloaded this is the shim's, which so learns which library is NCCL.
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version))
        if version.value != VERSION:
            sys.exit(f"{path} is version {version.value}; the layouts here are those of {VERSION}")
        self.at = symbols(path, {CHOOSE_NETWORK, LOG, TABLE, "ncclGetVersion"})
        self.base = (ctypes.cast(library.ncclGetVersion, c_void_p).value or 0) - self.at["ncclGetVersion"]
        self._table = (c_void_p * (len(FUNCTIONS) + 1)).from_address(self.base + self.at[TABLE])

    def call(self, name: str, *values: int | None) -> None:
        number = list(FUNCTIONS).index(name) + 1
        function = ctypes.CFUNCTYPE(c_int, *FUNCTIONS[name])(self._table[number] or 0)
        if result := function(*values):
            sys.exit(f"{name} returned {result}")

    def gives(self, name: str, *values: int | None) -> int | None:
        """Calls a function whose last parameter is where it puts a pointer; that pointer."""
        result = c_void_p()
        self.call(name, *values, addressof(result))
        return result.value

    def choose_network(self) -> None:
        comm, shared = ctypes.create_string_buffer(COMM_BYTES), ctypes.create_string_buffer(COMM_BYTES)
        c_void_p.from_address(addressof(comm) + SHARED_OF_COMM).value = addressof(shared)
        function = ctypes.CFUNCTYPE(c_int, c_void_p)(self.base + self.at[CHOOSE_NETWORK])
        print(f"ncclNetInit returned {function(addressof(comm))}", flush=True)


def until(what: str, ask: Callable[[], int | None]) -> int:
    ends = time.monotonic() + LIMIT_S
    while not (found := ask()):
        if time.monotonic() > ends:
            sys.exit(f"{what}: not within {LIMIT_S:.0f} s")
    return found


class Connection:
    """A connection of the process with itself, and a buffer at each end of it."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        configuration, context = c_int(-1), c_void_p()
        log = plugin.base + plugin.at[LOG]
        plugin.call("init", addressof(context), 1, addressof(configuration), log, None)
        handle, ends = ctypes.create_string_buffer(HANDLE_BYTES), (c_void_p * 2)()
        self.listener = plugin.gives("listen", context.value, 0, addressof(handle))
        unused = c_void_p()

        def both() -> int:
            for number, arguments in enumerate(((context.value, 0, addressof(handle)), (self.listener,))):
                if not ends[number]:
                    place = addressof(ends) + number * ctypes.sizeof(c_void_p)
                    plugin.call(("connect", "accept")[number], *arguments, place, addressof(unused))
            return bool(ends[0] and ends[1])

        until("the connection", both)
        self.sender, self.receiver = ends[0], ends[1]
        self.source, self.sink = (ctypes.create_string_buffer(BUFFER_BYTES) for _ in range(2))
        self.source_key = plugin.gives("regMr", self.sender, addressof(self.source), BUFFER_BYTES, HOST_MEMORY)
        self.sink_key = plugin.gives("regMr", self.receiver, addressof(self.sink), BUFFER_BYTES, HOST_MEMORY)

    def _sizes(self, request: int) -> list[int]:
        done, sizes = c_int(), (c_int * RECEIVES_MAX)()

        def ask() -> int:
            self.plugin.call("test", request, addressof(done), addressof(sizes))
            return done.value

        until("a request", ask)
        return list(sizes)

    def carry(self, pieces: int) -> None:
        """Fills the sink with new data, which arrives in so many pieces that are received as one."""
        each = BUFFER_BYTES // pieces
        self.source.raw = os.urandom(BUFFER_BYTES)
        places = (c_void_p * pieces)(*(addressof(self.sink) + number * each for number in range(pieces)))
        sizes, tags = (c_size_t * pieces)(*[each] * pieces), (c_int * pieces)(*range(pieces))
        keys, handles = (c_void_p * pieces)(*[self.sink_key] * pieces), (c_void_p * pieces)()
        given = [addressof(one) for one in (places, sizes, tags, keys, handles)]
        receive = self.plugin.gives("irecv", self.receiver, pieces, *given)
        if not receive:
            sys.exit("irecv gave no request")

        def send(number: int) -> int | None:
            start = addressof(self.source) + number * each
            return self.plugin.gives("isend", self.sender, start, each, number, self.source_key, None)

        sends = [until("a send", partial(send, number)) for number in range(pieces)]
        for request in sends:
            self._sizes(request)
        received = self._sizes(receive)[:pieces]
        if received != [each] * pieces or self.sink.raw != self.source.raw:
            sys.exit(f"{received} bytes were received, or other bytes than were sent")

    def close(self) -> None:
        self.plugin.call("deregMr", self.sender, self.source_key)
        self.plugin.call("deregMr", self.receiver, self.sink_key)
        self.plugin.call("closeSend", self.sender)
        self.plugin.call("closeRecv", self.receiver)
        self.plugin.call("closeListen", self.listener)


def main() -> None:
    plugin = Plugin(Path(sys.argv[1]))
    if sys.argv[2] == "init":
        plugin.choose_network()
        return
    connection = Connection(plugin)
    for pieces in (1, 4):  # more requests than a queue of the plugin has slots
        for _ in range(300):
            connection.carry(pieces)
    connection.close()
    print("carried", flush=True)
    while len(sys.argv) > 3 and not os.path.exists(sys.argv[3]):
        time.sleep(0.05)


if __name__ == "__main__":
    main()
