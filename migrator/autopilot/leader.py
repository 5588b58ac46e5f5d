"""Which of several autopilots acts: the one whose key is in etcd. The key belongs to a lease, and goes with it.

Invariant: the holder counts its lease from the moment at which it asked for it, and ends it LESS_S before etcd can. So a
process that runs has ended its term before the next one begins. One that was stopped meanwhile (SIGSTOP, a paused machine)
may believe for a moment that it still leads. That is why etcd itself compares `fence` in every change (shared.py), and why
`must_hold` is called before a daemon is asked to begin a move.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from migrator.autopilot.etcd import Etcd, Gone
from migrator.autopilot.shared import TermOver
from snapshotd.api import etcd_pb2 as pb
from snapshotd.api.errors import SnapshotError

log = logging.getLogger(__name__)

#: How long another autopilot waits at least after the leader was killed.
TTL_S = 5
#: How much earlier than etcd the holder ends its lease.
LESS_S = 1.0
RENEW_S = 1.0


def now_s() -> float:
    """Also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def my_name() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


class Term:
    """A time in which this process leads. `fence` is the revision of etcd in which its key was created."""

    def __init__(self, etcd: Etcd, lease: int, fence: int, until_s: float) -> None:
        self._etcd, self._lease, self.fence, self._until_s = etcd, lease, fence, until_s

    def must_hold(self) -> None:
        """Raises TermOver if the lease was not renewed in time."""
        if now_s() >= self._until_s:
            raise TermOver("etcd did not renew the lease of this autopilot in time")

    async def keep(self) -> None:
        """Renews the lease until it is lost, and raises TermOver then."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="autopilot-lease")  # so that no other work delays it
        try:
            while True:
                asked_s = now_s()
                renewing = loop.run_in_executor(thread, self._renew)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, self._until_s - asked_s)):
                        if await asyncio.shield(renewing):
                            self._until_s = asked_s + TTL_S - LESS_S
                self.must_hold()
                await asyncio.sleep(RENEW_S)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def _renew(self) -> bool:
        try:
            if self._etcd.keep_alive(self._lease):
                return True
        except SnapshotError as error:
            log.warning("the lease of the leader was not renewed: %s", error.message)
            return False
        self._until_s = float("-inf")
        return False

    def resign(self) -> None:
        """Lets another autopilot lead now. Blocks."""
        self._until_s = float("-inf")
        try:
            self._etcd.revoke(self._lease)
        except SnapshotError as error:
            log.warning("the lease could not be given back, and will expire: %s", error.message)


def current(etcd: Etcd, key: bytes) -> str:
    """Who leads; "" if there is no leader. Blocks."""
    found = etcd.get(key)
    return "" if found is None else found.value.decode(errors="replace")


def elect(etcd: Etcd, key: bytes) -> Term | str:
    """Makes this process the leader if there is none, else returns who leads. Blocks."""
    if found := current(etcd, key):
        return found
    asked_s = now_s()
    lease = etcd.grant(TTL_S)
    vacant = pb.Compare(target=pb.Compare.CREATE, key=key, create_revision=0)
    put = pb.RequestOp(request_put=pb.PutRequest(key=key, value=my_name().encode(), lease=lease))
    get = pb.RequestOp(request_range=pb.RangeRequest(key=key))
    try:
        answer = etcd.transact(pb.TxnRequest(compare=[vacant], success=[put], failure=[get]))
    except Gone:  # the lease has expired meanwhile
        return ""
    fence = answer.header.revision
    if not answer.succeeded:
        # A request whose answer was lost is sent again, and then fails because it has succeeded.
        kvs = answer.responses[0].response_range.kvs
        if not kvs or kvs[0].lease != lease:
            etcd.revoke(lease)
            return kvs[0].value.decode(errors="replace") if kvs else ""
        fence = kvs[0].create_revision
    return Term(etcd, lease, fence, asked_s + TTL_S - LESS_S)
