"""The target's end of the stripes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from snapshotd.api.channel import Credentials
from snapshotd.api.errors import SnapshotError


class Incoming:
    """The stripes of one move on their way here. On the loop that made it."""

    port: int
    key: bytes
    failed: SnapshotError | None = None

    @classmethod
    async def open(
        cls,
        folder: Path,
        names: Sequence[str],
        hosts: Sequence[str],
        credentials: Credentials,
        source_node: str,
        *,
        encrypted: bool,
        expected_bytes: int = 0,
    ) -> Incoming:
        """Listens, one child per name; the files are there and empty. `expected_bytes`: of all stripes together, a hint for
        the room to take now; Full when there is none."""
        raise NotImplementedError

    @property
    def received_bytes(self) -> int:
        """Verified and in the files."""
        raise NotImplementedError

    async def wait(self, timeout_s: float) -> Mapping[str, int]:
        """The final sizes. Raises Unreachable (a connection is lost, not back in 10 s), Damaged, Full, Timeout."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leaves no process and no socket; the files stay. Twice is once."""
        raise NotImplementedError
