"""The list of the ranks on this node, with the GPUs that they use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.keepers.ranks import RankEntry
from snapshotd.moves.node import Node
from snapshotd.proc.fd import read_links
from snapshotd.runtime.blocking import in_thread

_CARD = re.compile(r"/dev/nvidia(\d+)")


async def ranks_of(node: Node, *, brief: bool = False) -> list[pb.Rank]:
    """Every rank that this node knows; if `brief`, without the memory and the GPUs that it uses.

    The driver reports which processes use a GPU. Where it reports none (in a container), a process that has the GPU open
    counts.
    """
    if brief:
        return [entry.to_proto(node.config.node, brief=True) for entry in _known(node)]
    # A rank can have any number of processes.
    found = await in_thread(lambda: [(entry, entry.to_proto(node.config.node)) for entry in _known(node)])
    gpus = (await node.gpus.inventory()).gpus if found else ()
    reported = any(gpu.processes for gpu in gpus)
    for entry, rank in found:
        pids = set(await in_thread(entry.group.pids)) if gpus and not entry.away_node else set()
        cards = set() if reported or not pids else await in_thread(_open_cards, pids)
        for gpu in gpus:
            mine = [process for process in gpu.processes if process.pid in pids]
            if mine or gpu.index in cards:
                rank.gpus.append(gpu.uuid)
                rank.device_bytes += sum(process.memory_bytes for process in mine)
    return [rank for _, rank in found]


def _known(node: Node) -> list[RankEntry]:
    """All but copies that have died with their keepers: they are kept only until their end is reported."""
    return [entry for entry in node.ranks.all() if entry.role == "home" or entry.failed is None or entry.keeper_alive()]


def _open_cards(pids: Iterable[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found |= {int(card[1]) for _, link, _ in read_links(pid) if (card := _CARD.fullmatch(link))}
    return found
