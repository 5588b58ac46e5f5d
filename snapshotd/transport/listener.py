"""The listening ports of one move, one at each of the node's addresses for data. Both data channels accept connections here.

A channel is opened and authorised over gRPC, whose reply carries the port and a key that only the move's source receives. Any
host that reaches the port may connect, so each connection first has to authenticate: TLS where the channel uses it, then
whatever `serve` demands. It does so in a thread of its own, because a TLS handshake may block, and has CONNECT_S for it.

Invariant: connections that have not authenticated cannot keep the source out. At most `max_pending` are served at a time; one
more replaces the oldest. `close` returns when no thread and no socket of the listener is left.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from snapshotd.api.addresses import join_address
from snapshotd.api.errors import Busy, Internal, SnapshotError
from snapshotd.runtime.logs import Throttle
from snapshotd.transport import sockets
from snapshotd.transport.sockets import drain, hang_up, tune

log = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_PENDING = 32
#: Pause after an error of accept, most often a lack of descriptors. Connections wait in the kernel's queue meanwhile.
_RETRY_S = 0.2
#: Log records in a minute about connections that are rejected. Anybody can make as many of these as they like.
_MAX_COMPLAINTS = 10


class MoveListener:
    """Accepts connections until `stop`, or until `open_s` have passed. Every method may be called from any thread."""

    def __init__(
        self,
        what: str,
        hosts: Sequence[str],
        serve: Callable[[socket.socket], None],
        *,
        data_addresses: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        max_pending: int = MAX_PENDING,
        max_admitted: int | None = None,
        open_s: float | None = None,
    ) -> None:
        """Binds a free port at each of `data_addresses` that this machine has; without any, at the first of `hosts`
        that it has. Internal if it has none of them.

        `what` names the channel in logs. `serve` runs in the connection's thread, and calls `admit` once the peer has
        authenticated; the connection is closed when it returns.
        """
        self._what, self._serve, self._tls = what, serve, tls
        self._max_pending, self._max_admitted, self._open_s = max_pending, max_admitted, open_s
        self._sockets, named = _bind_all(hosts, data_addresses, what)
        self.port: int = self._sockets[0].getsockname()[1]
        #: Where to connect, if that is not `port` at the address by which this node is known.
        self.endpoints = [join_address(*one.getsockname()[:2]) for one in self._sockets] if named else []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._closing = False
        self._complaints = Throttle(log, _MAX_COMPLAINTS, "%s")
        self._pending: dict[socket.socket, None] = {}  # not yet authenticated; the oldest first
        self._admitted: set[socket.socket] = set()
        # A thread stays in here until it has ended: `close` must also wait for one that is done with its connection.
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for listener in self._sockets:
            name = f"{self._what} listener"
            self._begin(threading.Thread(target=self._accept_all, args=(listener,), name=name, daemon=True))

    @property
    def accepting(self) -> bool:
        return not self._stopped.is_set()

    @property
    def connected(self) -> bool:
        return bool(self._pending or self._admitted)

    def admit(self, connection: socket.socket) -> None:
        """The peer has authenticated: from now on the connection counts as the move's own. Busy if there are too many."""
        with self._lock:
            if self._max_admitted is not None and len(self._admitted) >= self._max_admitted:
                raise Busy(f"{self._what}: {len(self._admitted)} connections are open already, no more are allowed")
            self._pending.pop(connection, None)
            self._admitted.add(connection)

    def stop(self) -> None:
        """No new connection is accepted: the kernel refuses it at once. Idempotent, does not block."""
        self._stopped.set()
        for listener in self._sockets:
            hang_up(listener)

    def close(self) -> None:
        """Ends every connection and waits for the threads. Idempotent."""
        self._closing = True
        self.stop()
        while True:
            with self._lock:
                threads, self._threads = self._threads, []
                for connection in (*self._pending, *self._admitted):
                    hang_up(connection)
            if not threads:
                break
            for thread in threads:
                thread.join()
        for listener in self._sockets:
            listener.close()

    def _begin(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()]
            thread.start()  # under the lock: a thread that has not started cannot be joined
            self._threads.append(thread)

    def _accept_all(self, listener: socket.socket) -> None:
        ends_s = None if self._open_s is None else monotonic() + self._open_s
        with listener:
            while not self._stopped.is_set():
                if ends_s is not None:
                    left_s = ends_s - monotonic()
                    if left_s <= 0:
                        break
                    listener.settimeout(left_s)
                try:
                    connection, address = listener.accept()
                except TimeoutError:
                    break
                except ConnectionError:  # the peer has hung up already
                    continue
                except OSError as error:
                    if not self._stopped.is_set():
                        log.warning("%s: no connection can be accepted now: %s", self._what, error.strerror)
                        self._stopped.wait(_RETRY_S)
                    continue
                with contextlib.suppress(OSError):  # the peer has hung up already
                    self._accept(connection, address)
            self._stopped.set()

    def _accept(self, connection: socket.socket, address: Any) -> None:
        try:
            connection.settimeout(sockets.CONNECT_S)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._pending) >= self._max_pending:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                hang_up(oldest)
            self._pending[connection] = None
        self._begin(threading.Thread(target=self._run, args=(connection, address), name=self._what, daemon=True))

    def _run(self, connection: socket.socket, address: Any) -> None:
        try:
            if isinstance(connection, ssl.SSLSocket):
                _shake_hands(connection)
            self._serve(connection)
        except (SnapshotError, OSError) as error:
            if self._closing:
                return
            if connection in self._admitted:
                log.info("%s: the connection from %s ended: %s", self._what, address, error)
            else:
                silent = isinstance(error, TimeoutError)
                why = f"it did not authenticate within {sockets.CONNECT_S:.0f} s" if silent else str(error)
                self._complaints.warning(
                    self._what, "%s: the connection from %s is rejected: %s", self._what, address, why
                )
        finally:
            with self._lock:
                self._pending.pop(connection, None)
                self._admitted.discard(connection)
            connection.close()


def _shake_hands(connection: ssl.SSLSocket) -> None:
    """A peer that is rejected gets a TLS alert, and has time to read it: see `drain`."""
    try:
        connection.do_handshake()
    except ssl.SSLError:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_WR)
        drain(connection, sockets.CONNECT_S)
        raise


def _bind_all(hosts: Sequence[str], data_addresses: Sequence[str], what: str) -> tuple[list[socket.socket], bool]:
    """Ports at all addresses for data that this machine has and True, or one at the first of `hosts` and False."""
    found = []
    for address in data_addresses:
        try:
            found.append(_bind(address))
        except OSError as error:
            log.warning("%s: no port at %s, which data_addresses has: %s", what, address, error.strerror or error)
    if found:
        return found, True
    failures = []
    for host in hosts:
        try:
            return [_bind(host)], False
        except OSError as error:  # advertised but translated on the way (NAT): not an address of this machine
            failures.append(f"{host}: {error.strerror or error}")
    raise Internal(f"{what}: no port can be opened: {'; '.join(failures)}")


def _bind(host: str) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(listener)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener
