"""The source's end of the stripes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from snapshotd.api.channel import Credentials
from snapshotd.api.errors import SnapshotError
from snapshotd.stripes.totals import Totals


class Outgoing:
    """The stripes of one move on their way to the target. On the loop that made it."""

    failed: SnapshotError | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        key: bytes,
        credentials: Credentials,
        node: str,
        folder: Path,
        names: Sequence[str],
        *,
        encrypted: bool,
    ) -> Outgoing:
        """Connected, one child per name. `node`: the target's. The files need not exist yet. Unreachable, Denied."""
        raise NotImplementedError

    @property
    def sent_bytes(self) -> int:
        """Of the stripes, that are on their way (also those that were zero): for a progress bar."""
        raise NotImplementedError

    def advance(self, name: str, size: int) -> None:
        """So many bytes of the file may be sent now. Cheap; a smaller number than before changes nothing."""
        raise NotImplementedError

    def finish(self, sizes: Mapping[str, int]) -> None:
        """The final sizes, of all names."""
        raise NotImplementedError

    async def wait(self) -> Totals:
        """All is stored and verified at the target. Raises what went wrong (Unreachable, Damaged, Full, Internal)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Kills what is left; twice is once."""
        raise NotImplementedError
