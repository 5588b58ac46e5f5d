"""Chooses the GPUs of the target that replace those of the source. Pure: facts in, pairs and a description out.

Invariant: the pairs name every GPU of the source node exactly once and no GPU of the target twice, as the driver's restore
requires. Preflight's refusals come from the same code, so that a passed check and a failed choice are impossible with the
same facts. Nothing is reserved here: the caller does that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused, Where

#: The first driver whose restore can put a process on another GPU (CUcheckpointRestoreArgs.gpuPairs).
PAIRING_DRIVER = 580

#: GPUs of one model differ slightly in the memory they report (ECC, memory reserved by the driver).
_SIZE_TOLERANCE = 0.05

_EACH_ONE = "the driver needs a counterpart for each GPU of the source, including those the rank does not use"
_ANOTHER_NODE = "choose another node (`migrator nodes` shows their GPUs)"


class Unfit(Refused):
    """No GPU of this node can take the rank. `check` is the name of the preflight check that reports it."""

    def __init__(self, check: str, reason: str, remedy: str) -> None:
        super().__init__(f"{check}: {reason}", remedy=remedy, where=Where.SOURCE_RUNNING)
        self.check, self.reason = check, reason


def driver_major(version: str) -> int:
    """580 of 580.159.04; 0 if that is not a version."""
    found = re.match(r"(\d{1,6})\b", version)
    return int(found[1]) if found else 0


def short(uuid: str) -> str:
    """The part of a UUID that distinguishes GPUs, for people; `--gpu` accepts it too."""
    return uuid[:12]


def describe(gpu: pb.Gpu) -> str:
    return f"{gpu.index} ({gpu.name}, {short(gpu.uuid)})"


def choose(
    facts: pb.GpuFacts, node: Sequence[pb.Gpu], wish: str, *, resumes: bool = False
) -> tuple[list[pb.GpuPair], str]:
    """A pair for every GPU of the source, in its order, and a description of the rank's new place.

    A GPU that both nodes have (two nodes of a lab on one machine) stays. Otherwise the rank gets an unused GPU of the
    same model, the one at the same place (bus id and index) if it can: a restored process may go on reporting the bus id
    that its GPU had, by which NCCL tells the GPUs of a node apart (cuda-checkpoint #48). A rank that sees only some of
    its node's GPUs (CUDA_VISIBLE_DEVICES) keeps its indices, because the driver cannot map GPUs for it (cuda-python
    #1983). With a `wish` (an index of the target, a UUID or its beginning; for several GPUs a list with commas, in the
    order of the source's indices) it gets that GPU, even if others use it, provided that it fits.

    A rank that is resumed (`resumes`) has no process and no memory on a GPU: others may use the one that it had. It shares
    that one with them only if no GPU here is unused.

    Raises Unfit.
    """
    sources = {gpu.uuid: gpu for gpu in facts.node_gpus}
    if not sources:
        raise Unfit("gpu-present", "the source could not list its GPUs", "see its own checks")
    if not node:
        raise Unfit("gpu-present", "no GPU here", _ANOTHER_NODE)
    if len(node) < len(sources):
        raise Unfit(
            "gpu-present",
            f"{_count(len(node))} here, {len(sources)} on the source: {_EACH_ONE}",
            _ANOTHER_NODE,
        )
    needs = {use.uuid: use.memory_bytes for use in facts.uses}
    if strange := sorted(needs.keys() - sources.keys()):
        raise Unfit(
            "gpu-present", f"the source does not have the GPU that its rank uses: {', '.join(strange)}", "retry"
        )
    used = sorted((sources[uuid] for uuid in needs), key=lambda gpu: gpu.index)
    if lost := [describe(gpu) for gpu in used if gpu.lost]:
        raise Unfit(
            "gpu-present",
            f"the source has lost the GPU that its rank uses, and with it the rank's device memory: {'; '.join(lost)}",
            "end the job and start it from its last checkpoint",
        )
    fixed = keeps_indices(facts)
    older = driver_major(facts.driver_version) < PAIRING_DRIVER
    staying = {gpu.uuid: gpu for gpu in node if gpu.uuid in needs and (older or not resumes)}
    chosen = _wished(used, node, wish) if wish else staying
    if older:
        _only_itself(facts, node, chosen)
    for gpu in sorted(used, key=lambda gpu: (-needs[gpu.uuid], gpu.index)):  # the hardest to place first
        settled = gpu.uuid in chosen
        taken = {mate.uuid for mate in chosen.values()}
        candidates = [chosen[gpu.uuid]] if settled else [mate for mate in node if mate.uuid not in taken]
        if fixed:
            candidates = _of_same_index(facts, gpu, candidates)
        chosen[gpu.uuid] = _place(gpu, needs[gpu.uuid], candidates, may_share=settled, resumes=resumes)
    everything = _complete(sources, node, chosen)
    pairs = [pb.GpuPair(old_uuid=uuid, new_uuid=everything[uuid].uuid) for uuid in sources]
    return pairs, _description(used, node, chosen)


def keeps_indices(facts: pb.GpuFacts) -> bool:
    """Whether the driver can restore the rank only onto GPUs with the same indices, without pairs."""
    return 0 < facts.visible < len(facts.node_gpus)


def _of_same_index(facts: pb.GpuFacts, gpu: pb.Gpu, candidates: Sequence[pb.Gpu]) -> list[pb.Gpu]:
    found = [mate for mate in candidates if mate.uuid == gpu.uuid or mate.index == gpu.index]
    if not found:
        raise Unfit(
            "gpu-present",
            f"the rank sees {facts.visible} of {_count(len(facts.node_gpus))} (CUDA_VISIBLE_DEVICES), and such a rank can"
            f" only be restored onto the same index: GPU {gpu.index} is not among those here that could be chosen",
            f"choose a node with a free GPU {gpu.index}, or start the job without CUDA_VISIBLE_DEVICES",
        )
    return found


def _wished(used: Sequence[pb.Gpu], node: Sequence[pb.Gpu], wish: str) -> dict[str, pb.Gpu]:
    """UUID on the source -> the requested GPU."""
    names = [name.strip() for name in wish.split(",")]
    if len(names) != len(used):
        raise Unfit(
            "gpu-present",
            f"the rank uses {_count(len(used))}, but --gpu names {len(names)} ({wish})",
            "name as many with --gpu, separated by commas, or leave it out",
        )
    found = [_named(name, node) for name in names]
    if len({gpu.uuid for gpu in found}) < len(found):
        raise Unfit("gpu-present", f"--gpu names one GPU twice ({wish})", "name different GPUs with --gpu")
    return {gpu.uuid: mate for gpu, mate in zip(used, found, strict=True)}


def _named(name: str, node: Sequence[pb.Gpu]) -> pb.Gpu:
    """By index, else by UUID or its beginning, with or without `GPU-`."""
    found = [gpu for gpu in node if name.isascii() and name.isdigit() and gpu.index == int(name)]
    if not found and name:
        start = name.lower().removeprefix("gpu-")
        found = [gpu for gpu in node if gpu.uuid.lower().removeprefix("gpu-").startswith(start)]
    if len(found) != 1:
        raise Unfit(
            "gpu-present",
            f"{'more than one GPU' if found else 'no GPU'} here is named {name!r}; there is {_listed(node, describe)}",
            "name an index or the beginning of a UUID (`migrator nodes --json`)",
        )
    return found[0]


def _only_itself(facts: pb.GpuFacts, node: Sequence[pb.Gpu], chosen: dict[str, pb.Gpu]) -> None:
    here = {gpu.uuid for gpu in node}
    if all(gpu.uuid in here and chosen.get(gpu.uuid, gpu).uuid == gpu.uuid for gpu in facts.node_gpus):
        return
    raise Unfit(
        "gpu-driver",
        f"driver {facts.driver_version} can restore a rank only onto the same GPU",
        f"install driver {PAIRING_DRIVER} or newer on both nodes",
    )


def _place(gpu: pb.Gpu, need_bytes: int, candidates: Sequence[pb.Gpu], *, may_share: bool, resumes: bool) -> pb.Gpu:
    """The candidate with the most free memory, of those that can take what the rank has, or had, on `gpu`.

    A GPU reserved for another move is not used, except by a rank that is on it already: that one needs no more memory than
    it has, so neither can take the other's.
    """
    whole = [mate for mate in candidates if not mate.mig]
    if not whole:
        raise Unfit(
            "gpu-mig", f"partitioned (MIG): {_listed(candidates, describe)}", "turn MIG off there (`nvidia-smi -mig 0`)"
        )
    same = [mate for mate in whole if alike(gpu, mate)]
    if not same:
        raise Unfit("gpu-chip", f"the rank is on {_chip(gpu)}; here: {_listed(whole, _chip)}", _ANOTHER_NODE)
    free = [mate for mate in same if mate.uuid == gpu.uuid or not _occupied(mate, may_share)]
    if not free:
        raise Unfit(
            "gpu-free",
            f"taken: {_listed(same, _occupant)}",
            "wait until it is free, name it with --gpu to share it, or " + _ANOTHER_NODE,
        )
    # What the rank itself has on the same GPU is free once it has left it.
    own_bytes = 0 if resumes else need_bytes
    room = {mate.uuid: mate.memory_free_bytes + own_bytes * (mate.uuid == gpu.uuid) for mate in free}
    fitting = [mate for mate in free if room[mate.uuid] >= need_bytes]
    if not fitting:
        found = _listed(free, lambda mate: f"{_gib(room[mate.uuid])} free on {describe(mate)}")
        raise Unfit(
            "gpu-memory", f"the rank needs {_gib(need_bytes)}; {found}", f"free memory there, or {_ANOTHER_NODE}"
        )
    return max(
        fitting,
        key=lambda mate: (
            not (resumes and _occupied(mate, False)),
            *_nearness(gpu, mate),
            room[mate.uuid] >> 30,
            -mate.index,
        ),
    )


def _nearness(gpu: pb.Gpu, mate: pb.Gpu) -> tuple[bool, bool]:
    """Whether it is at the same place of its node: by bus id, and by index."""
    return (bool(gpu.bus_id) and gpu.bus_id == mate.bus_id, gpu.index == mate.index)


def _complete(sources: dict[str, pb.Gpu], node: Sequence[pb.Gpu], chosen: dict[str, pb.Gpu]) -> dict[str, pb.Gpu]:
    """The choice, and a counterpart for every GPU that the rank does not use: itself if possible."""
    everything = dict(chosen)
    left = {gpu.uuid: gpu for gpu in node if gpu.uuid not in {mate.uuid for mate in chosen.values()}}
    for uuid in sources:
        if uuid not in everything and uuid in left:
            everything[uuid] = left.pop(uuid)
    for uuid, gpu in sources.items():
        if uuid in everything:
            continue
        same = [mate for mate in left.values() if alike(gpu, mate) and gpu.mig == mate.mig]
        mate = max(same, key=lambda mate: (*_nearness(gpu, mate), -mate.index), default=None)
        if mate is None:
            raise Unfit(
                "gpu-chip",
                f"no GPU here can replace the source's {describe(gpu)}: {_EACH_ONE}",
                _ANOTHER_NODE,
            )
        everything[uuid] = left.pop(mate.uuid)
    return everything


def alike(one: pb.Gpu, other: pb.Gpu) -> bool:
    """Whether these are the same model with the same memory, so that the driver can restore from one to the other."""
    return (
        one.name == other.name
        and one.compute_capability == other.compute_capability
        and abs(one.memory_bytes - other.memory_bytes) <= _SIZE_TOLERANCE * max(one.memory_bytes, other.memory_bytes)
    )


def _occupied(gpu: pb.Gpu, may_share: bool) -> bool:
    return bool(gpu.reserved_for) or (bool(gpu.processes) and not may_share)


def _occupant(gpu: pb.Gpu) -> str:
    occupant = f"reserved for move {gpu.reserved_for}" if gpu.reserved_for else _pids(gpu)
    return f"{describe(gpu)}: {occupant}"


def _pids(gpu: pb.Gpu) -> str:
    return "in use by pid " + ", ".join(str(process.pid) for process in gpu.processes[:4])


def _chip(gpu: pb.Gpu) -> str:
    return f"{gpu.name} with {_gib(gpu.memory_bytes)} (compute capability {gpu.compute_capability})"


def _listed(gpus: Iterable[pb.Gpu], text_of: Callable[[pb.Gpu], str]) -> str:
    """Each text once, for eight equal GPUs too."""
    return "; ".join(dict.fromkeys(text_of(gpu) for gpu in gpus))


def _count(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


def _description(used: Sequence[pb.Gpu], node: Sequence[pb.Gpu], chosen: dict[str, pb.Gpu]) -> str:
    parts = []
    for gpu in used:
        mate = chosen[gpu.uuid]
        if mate.uuid == gpu.uuid:
            parts.append(f"stays on {describe(gpu)}")
        else:
            parts.append(f"{gpu.index} → {describe(mate)}{_why_elsewhere(gpu, mate, node)}")
    return "; ".join(parts) or "on no GPU yet"


def _why_elsewhere(gpu: pb.Gpu, mate: pb.Gpu, node: Sequence[pb.Gpu]) -> str:
    """Why a GPU at another place of the bus was chosen."""
    if not gpu.bus_id or not mate.bus_id or gpu.bus_id == mate.bus_id:
        return ""
    there = next((one for one in node if one.bus_id == gpu.bus_id), None)
    if there is None:
        return f", because no GPU here is at {gpu.bus_id}"
    if _occupied(there, False):
        return f", because the one at {gpu.bus_id} is taken: {_occupant(there)}"
    return f", instead of the one at {gpu.bus_id}, {describe(there)}"
