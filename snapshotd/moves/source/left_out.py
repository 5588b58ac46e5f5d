"""Finds the pages of a frozen rank that criu need not dump (snapshotd/criu/below.py), of every kind.

A process has pages of one kind only below its image, the first of these: those that were sent before the freeze; those that
it shares with its parent; those that its twin has; those that are read beside criu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from snapshotd.criu.below import Layer
from snapshotd.moves.precopied import Precopied
from snapshotd.moves.source import large_memory
from snapshotd.moves.source.fork_sharing import ForkSharing
from snapshotd.moves.source.large_memory import LargeMemory
from snapshotd.moves.source.twin_memory import TwinMemory


@dataclass(frozen=True)
class LeftOut:
    layers: Sequence[Layer] = ()
    large: Sequence[LargeMemory] = field(
        default=()
    )  # those of the layers that are read beside criu, while the rank waits


def find(pids: Sequence[int], precopied: Precopied, twins: TwinMemory | None, *, beside: bool) -> LeftOut:
    """`beside`: whether large memory is read beside criu. Blocking."""
    layers = [*precopied.layers, *ForkSharing(pids, without=precopied.pids).layers()]
    if twins is not None:
        layers += twins.find({layer.pid for layer in layers})
    if (
        not beside or precopied.begun
    ):  # the same files have what was sent before the freeze: it may be there, and not count
        return LeftOut(layers)
    taken = {pid for layer in layers for pid in (layer.pid, layer.parent)}
    large = large_memory.find(pids, taken)
    return LeftOut([*layers, *(one.layer for one in large)], large)
