"""Checks that a job which is to be suspended is connected with itself alone. Pure.

Both ends of a connection between two ranks are restored. The other end of any other connection would wait for a rank that
does not exist, for as long as the job is suspended, so such a job is refused. Connections to hosts without a daemon are
reset, as in a move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snapshotd.api import snapshotd_pb2 as pb

NAME = "suspend-peers"
_End = tuple[str, int, str, int]


def check(rewires: Mapping[int, Sequence[pb.Rewire]]) -> pb.Check:
    """`rewires`: the sockets of each rank, by its number."""
    ends = {_end(one) for of_rank in rewires.values() for one in of_rank if one.kind == pb.Rewire.PEER}
    alone = [
        f"rank {rank}: {one.old_local.ip}:{one.old_local.port} → {one.old_remote.ip}:{one.old_remote.port} on {one.peer_node}"
        for rank, of_rank in sorted(rewires.items())
        for one in of_rank
        if one.kind == pb.Rewire.PEER and not one.ended and _mirrored(_end(one)) not in ends
    ]
    if not alone:
        return pb.Check(name=NAME, reason=f"{len(ends)} ends of connections between ranks of the job")
    return pb.Check(
        name=NAME,
        verdict=pb.Check.REFUSE,
        reason="these connections lead to processes that are not ranks of the job, or through a forwarded address: "
        + "; ".join(alone[:5]),
        remedy="start the ranks without a store in the launcher (torchrun has one; `migrator run -- python train.py` with"
        " RANK and MASTER_ADDR has none), and name all processes of the job with the same --job",
    )


def _end(rewire: pb.Rewire) -> _End:
    return rewire.old_local.ip, rewire.old_local.port, rewire.old_remote.ip, rewire.old_remote.port


def _mirrored(end: _End) -> _End:
    return end[2], end[3], end[0], end[1]
