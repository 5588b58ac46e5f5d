"""The connections between the ranks of a job, by the addresses of their ends. Pure.

Both ends of a connection between two ranks are restored. The other end of any other connection would wait for a rank that
does not exist, for as long as the job is suspended, so such a job is refused. Connections to hosts without a daemon are
reset, as in a move.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from snapshotd.api import snapshotd_pb2 as pb

NAME = "suspend-peers"
#: The node, if only processes of that node see this connection; local and remote address.
_End = tuple[str, str, int, str, int]


@dataclass(frozen=True)
class Sockets:
    """The sockets of a rank, and the node that it is on, or was on when it was suspended."""

    node: str
    rewires: Sequence[pb.Rewire]

    def peers(self) -> Iterator[tuple[pb.Rewire, _End, _End]]:
        """Those that are connected with a process of a node, with their own end and the opposite one."""
        for one in self.rewires:
            if one.kind == pb.Rewire.PEER:
                local, remote = one.old_local, one.old_remote
                node = self.node if _within_node(local.ip, remote.ip) else ""
                yield (
                    one,
                    (node, local.ip, local.port, remote.ip, remote.port),
                    (node, remote.ip, remote.port, local.ip, local.port),
                )


def check(ranks: Mapping[int, Sockets]) -> pb.Check:
    """Whether the job is connected with itself alone. `ranks`: by number."""
    ends = {own for sockets in ranks.values() for _, own, _ in sockets.peers()}
    alone = [
        f"rank {rank}: {one.old_local.ip}:{one.old_local.port} → {one.old_remote.ip}:{one.old_remote.port} on {one.peer_node}"
        for rank, sockets in sorted(ranks.items())
        for one, _, opposite in sockets.peers()
        if not one.ended and opposite not in ends
    ]
    if not alone:
        return pb.Check(name=NAME, reason=f"{len(ends)} ends of connections between ranks of the job")
    return pb.Check(
        name=NAME,
        verdict=pb.Check.REFUSE,
        reason="these connections lead to processes that are not ranks of the job, or through a forwarded address: "
        + "; ".join(alone[:5]),
        remedy="start the job without a store in the launcher, which torchrun has with --master-addr: use `migrator run"
        " --protect -- torchrun …`, `migrator run -- torchrun --rdzv-backend c10d --rdzv-endpoint HOST:PORT …`, or"
        " `migrator run -- python train.py` with RANK and MASTER_ADDR; name all processes of the job with the same --job",
    )


def of_each(ranks: Mapping[str, Sockets]) -> dict[str, dict[str, list[pb.Rewire]]]:
    """For every rank what its target has to know to plan its addresses: its own sockets, and of other ranks only the ends of
    connections with it. All sockets of all ranks would not fit into a message. Keys are the uids of ranks."""
    holders = {own: (uid, one) for uid, sockets in ranks.items() for one, own, _ in sockets.peers()}
    found: dict[str, dict[str, list[pb.Rewire]]] = {}
    for uid, sockets in ranks.items():
        seen = found[uid] = {uid: list(sockets.rewires)}
        for _, _, opposite in sockets.peers():
            peer, end = holders.get(opposite, (uid, None))
            if end is not None and peer != uid:
                seen.setdefault(peer, []).append(end)
    return found


def _within_node(local: str, remote: str) -> bool:
    """Whether a connection is one of a node with itself: other nodes may have one with the same addresses."""
    return local == remote or ipaddress.ip_address(local).is_loopback
