"""Finds the pages of a frozen rank that criu need not dump (snapshotd/criu/below.py), of every kind.

A process has pages of one kind only below its image, the first of these: those of mappings that were sent before the freeze;
those that it shares with its parent; those that its twin has; those that are read beside criu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.criu.below import Layer
from snapshotd.moves.precopied import Precopied
from snapshotd.moves.source import large_memory, last_round
from snapshotd.moves.source.fork_sharing import ForkSharing
from snapshotd.moves.source.large_memory import ReadBeside
from snapshotd.moves.source.twin_memory import TwinMemory
from snapshotd.transport.image.overlay import file_of


@dataclass(frozen=True)
class LeftOut:
    layers: Sequence[Layer] = ()
    beside: Sequence[ReadBeside] = field(default=())  # what of it is read beside criu, while the rank waits
    files: Sequence[pb.ImageFile] = field(default=())  # what the target has of it already


def find(pids: Sequence[int], precopied: Precopied, twins: TwinMemory | None, *, beside: bool) -> LeftOut:
    """`beside`: whether large memory is read beside criu. Blocking."""
    rounds = last_round.find(precopied)
    files = {one.sent.followed.file for one in rounds}
    layers = [one.layer for one in rounds]
    layers += ForkSharing(pids, without=[one.pid for one in rounds]).layers()
    if twins is not None:
        layers += twins.find({layer.pid for layer in layers})
    read: list[ReadBeside] = [*rounds]
    if beside:
        # Processes of which something was sent that does not count have a file of that name on the target.
        large = large_memory.find(pids, layers, without=precopied.begun)
        read += large
        layers += [one.layer for one in large]
    return LeftOut(layers, read, [file for file in precopied.files if file_of(file.name) in files])
