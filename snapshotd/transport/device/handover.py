"""What a daemon hands to a child with a connection: the keys that seal what travels over it, or nothing.

On the line to the child alone: others can read command lines and environments. Apart from connection.py, which uses the keys,
because that brings `cryptography` along, which the daemon can do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Keys:
    """Of one connection, as one of its ends uses them."""

    sends: bytes = field(repr=False)
    reads: bytes = field(repr=False)

    def message(self) -> dict[str, str]:
        return {"sends": self.sends.hex(), "reads": self.reads.hex()}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Keys | None:
        """None: what travels is not sealed."""
        if "sends" not in message:
            return None
        return cls(bytes.fromhex(message["sends"]), bytes.fromhex(message["reads"]))
