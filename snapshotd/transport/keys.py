"""The keys of one connection of a data channel, which a daemon may pass to a child together with it.

They travel over the control socket alone, because other processes can read command lines and environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Keys:
    """The keys of one connection, as one side uses them."""

    sends: bytes = field(repr=False)
    reads: bytes = field(repr=False)

    def message(self) -> dict[str, str]:
        return {"sends": self.sends.hex(), "reads": self.reads.hex()}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Keys | None:
        """None if the connection is not encrypted."""
        if "sends" not in message:
            return None
        return cls(bytes.fromhex(message["sends"]), bytes.fromhex(message["reads"]))
