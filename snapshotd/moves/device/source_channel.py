"""The source's end of the device-memory channel: sends stripe files to the target while they grow.

Invariant: the channel may fail at any time before the target holds the copy; then the image channel carries the files, after
the dump. No byte is sent before it was copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import UnknownMethod
from snapshotd.api.errors import Internal, SnapshotError, Timeout, Unreachable
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.device import stripe_files
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.proc.tree import Process
from snapshotd.transport.device.outgoing import Outgoing
from snapshotd.transport.routes import routes_to

log = logging.getLogger(__name__)

OPEN_S = 30.0
#: Everything has arrived when the target holds the copy; only a child process has to exit.
FINISH_S = 10.0
#: How long a target may take to learn that no stripes come; the job runs meanwhile.
GIVE_UP_S = 3.0


class SourceChannel:
    """The channel of one move, and how much of each stripe was copied so far. It is lost when the daemon restarts."""

    def __init__(self, node: Node, move_log: MoveLog, names: Sequence[str], warn: Callable[[str], None]) -> None:
        self.node, self.log, self.warn = node, move_log, warn
        self.names = list(names)
        self.folder = stripe_files.folder_of(node.config.image_dir, move_log.move)
        self.outgoing: Outgoing | None = None
        self._advanced = dict.fromkeys(self.names, 0)
        self._held: tuple[int, str] = 0, ""
        self._holder: Process | None = None
        #: The target fills memory on its GPU while stripes arrive, once it knows the blocks.
        self.fills = False
        #: The target takes the memory over where it is, once it knows the blocks. Nothing is sent.
        self.takes_over = False

    def hold(self, slot_bytes: int, gpu: str, holder: Process | None = None) -> None:
        """Before `open`: the memory of this GPU stays there until it is sent, and the files are rings. `holder`: a target
        of the same machine and GPU may take it over from this process instead."""
        self._held, self._holder = (slot_bytes, gpu), holder

    @property
    def works(self) -> bool:
        return self.takes_over or (self.outgoing is not None and self.outgoing.failed is None)

    @property
    def sent_bytes(self) -> int:
        return self.outgoing.sent_bytes if self.outgoing is not None else 0

    async def open(self, expected_bytes: int) -> None:
        """Opens the channel, or warns that there is none. Raises UnknownMethod if the target cannot refill. A rank that is
        suspended with its job has none: its image stays here, and the files with it."""
        begin, config = self.log.begin, self.node.config
        if begin.coordinator:
            return
        request = pb.OpenDeviceChannelRequest(
            move=begin.move,
            names=self.names,
            expected_bytes=expected_bytes,
            plain=config.device_channel == "plain",
            sealed=True,
            slot_bytes=self._held[0],
            gpu=self._held[1],
        )
        if self._holder is not None:
            request.machine = self.node.room.machine
            request.holder.CopyFrom(pb.ProcessId(pid=self._holder.pid, start_ticks=self._holder.start_ticks))
        try:
            async with self.node.client(begin.target_node, begin.target_endpoint) as client:
                opened = await client.target.OpenDeviceChannel(request, timeout_s=OPEN_S)
            if not opened.sealed:
                raise Internal(f"{begin.target_node} has an older version, with other data connections")
            if opened.takes_over and self._holder is not None:
                self.takes_over = True
                return
            if opened.plain and not request.plain:
                raise Internal(
                    f"{begin.target_node} wants device memory without encryption",
                    remedy="see device_channel",
                )
            self.outgoing = await Outgoing.open(
                routes_to(begin.target_endpoint, opened.port, opened.endpoints, config.data_addresses),
                opened.key,
                begin.target_node,
                self.node.credentials,
                self.folder,
                self.names,
                encrypted=not opened.plain,
                rings=bool(self._held[0]),
            )
            self.fills = opened.fills
        except UnknownMethod:
            raise
        except (Unreachable, Internal, Timeout) as error:
            self.warn(
                f"offloaded device memory follows the image, for lack of a device-memory channel: {error.message}"
            )

    async def reopen(self, expected_bytes: int) -> None:
        """Replaces a channel that broke before anything was sent."""
        if self.outgoing is None or self.outgoing.failed is None:
            return
        self.warn(f"the device-memory channel broke, and is opened again: {reason(self.outgoing.failed)}")
        await self.close()
        with contextlib.suppress(SnapshotError):  # then it follows the image
            await self.open(expected_bytes)

    async def allocate(self, pid: int, blocks: Sequence[HeldBlock], key: str) -> None:
        """Tells a target that fills what to create, and one that takes over what to take: it has taken it then. Raises a
        SnapshotError."""
        begin = self.log.begin
        listed = [pb.DeviceBlock(address=one.address, bytes=one.bytes, device=one.device) for one in blocks]
        request = pb.AllocateDeviceMemoryRequest(move=begin.move, pid=pid, blocks=listed, key=key)
        async with self.node.client(begin.target_node, begin.target_endpoint) as client:
            await client.target.AllocateDeviceMemory(request, timeout_s=OPEN_S)

    def advance(self, names: Sequence[str], done: Sequence[int]) -> None:
        """So many bytes of these stripes were copied and can be sent."""
        for name, size in zip(names, done, strict=False):
            self._advanced[name] = max(self._advanced[name], size)
            if self.outgoing is not None:
                self.outgoing.advance(name, size)

    def announce_sizes(self) -> None:
        """Nothing is copied any more: what `advance` announced is all of each stripe."""
        if self.outgoing is not None:
            self.outgoing.finish(self._advanced)

    async def finish(self) -> int:
        """COMMIT stands, so everything has arrived: closes the channel and returns the bytes that were sent."""
        sent = 0
        if self.outgoing is not None:
            try:
                async with asyncio.timeout(FINISH_S):
                    sent = (await self.outgoing.wait()).sent
            except (SnapshotError, TimeoutError) as error:
                log.warning("the stripes of %s arrived, but their channel failed: %s", self.log.move, reason(error))
        await self.close()
        return sent

    async def give_up(self) -> None:
        """Tells the target that no stripes come, which frees its room at once, and closes the channel."""
        if self.outgoing is not None:
            with contextlib.suppress(SnapshotError, TimeoutError):
                self.outgoing.finish(dict.fromkeys(self.names, 0))
                async with asyncio.timeout(GIVE_UP_S):
                    await self.outgoing.wait()
        await self.close()

    async def close(self) -> None:
        """Stops sending; the files stay. Idempotent."""
        self.takes_over = False
        if self.outgoing is not None:
            outgoing, self.outgoing = self.outgoing, None
            await outgoing.close()


def reason(error: BaseException) -> Any:
    return error.message if isinstance(error, SnapshotError) else error
