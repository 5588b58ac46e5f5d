"""Manages the target's device-memory channels: one per move, from the source's request until the move has ended here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import SnapshotError, Usage
from snapshotd.moves.device.fills import Fills
from snapshotd.moves.device.stripe_files import NAME
from snapshotd.moves.device.takeover import TakeOver
from snapshotd.transport.device.incoming import Incoming
from snapshotd.transport.device.stripe_names import MAX_STRIPES


class DeviceChannels:
    """All channels of this node. Not thread-safe: belongs to one event loop."""

    def __init__(self, hosts: Sequence[str], credentials: Credentials, data_addresses: Sequence[str] = ()) -> None:
        self._hosts, self._credentials, self._data_addresses = hosts, credentials, data_addresses
        self._open: dict[str, Incoming] = {}
        self._fills: dict[str, Fills | TakeOver] = {}

    async def open(
        self,
        move: str,
        folder: Path,
        names: Sequence[str],
        source_node: str,
        *,
        plain: bool,
        expected_bytes: int,
        ring_bytes: int = 0,
    ) -> Incoming:
        """Opens a channel into `folder`, that of the move. Replaces an earlier one, whose answer was lost. `ring_bytes`: as
        for Incoming."""
        if not 1 <= len(names) <= MAX_STRIPES or len(set(names)) != len(names):
            raise Usage(f"{len(names)} stripes: 1 to {MAX_STRIPES} are possible, each with its own name")
        for name in names:
            if not NAME.fullmatch(name):
                raise Usage(f"{name[:100]!r} is not the name of a stripe")
        await self.close(move)
        for name in names:
            (folder / name).unlink(missing_ok=True)
        incoming = self._open[move] = await Incoming.open(
            folder,
            names,
            self._hosts,
            source_node,
            self._credentials,
            encrypted=not plain,
            expected_bytes=expected_bytes,
            data_addresses=self._data_addresses,
            ring_bytes=ring_bytes,
        )
        return incoming

    async def fill(self, move: str, fills: Fills | TakeOver) -> None:
        """Fills memory on the GPU from the channel's files, or takes it over without a channel. If it cannot begin, the
        channel is closed."""
        self._fills[move] = fills
        try:
            await fills.start()
        except BaseException:
            await self.close(move)
            raise

    def fills(self, move: str) -> Fills | TakeOver | None:
        return self._fills.get(move)

    def find(self, move: str) -> Incoming | None:
        return self._open.get(move)

    def fail(self, move: str, why: SnapshotError) -> None:
        """Receives nothing more: the source and a refill in progress learn why. Idempotent."""
        incoming = self._open.get(move)
        if incoming is not None:
            incoming.fail(why)

    async def close(self, move: str) -> None:
        """Stops receiving; the files stay. Idempotent."""
        fills, incoming = self._fills.pop(move, None), self._open.pop(move, None)
        if incoming is not None:
            await incoming.close()
        if fills is not None:
            await fills.close()

    async def close_all(self) -> None:
        for move in {*self._open, *self._fills}:
            await self.close(move)
