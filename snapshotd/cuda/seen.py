"""Remembers the GPUs that this node has had since it booted.

A process that has initialised CUDA knows all GPUs that the node had then, and the driver's restore needs a counterpart
for each of them. One that is lost since, which is a good reason to leave the node, is not listed by NVML any more. A process
that was started after it was first missed never saw it. The memory is a file of /run: a restarted daemon still knows them,
and after a boot no process does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import json_format

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.proc import host

log = logging.getLogger(__name__)


class SeenGpus:
    """All GPUs since boot, by UUID. Without a path they are remembered only as long as the daemon runs."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._gpus: dict[str, pb.Gpu] = {}
        if path is not None:
            self._gpus = _read(path)

    def note(self, gpus: Sequence[pb.Gpu]) -> None:
        """These are here now, and no others. Nothing is noted without any: then NVML has failed."""
        if not gpus:
            return
        fresh = {gpu.uuid: _identity(gpu) for gpu in gpus}
        for uuid, gpu in self._gpus.items():
            if uuid not in fresh:
                fresh[uuid] = gpu if gpu.missed_since_s else _missed(gpu)
        if self._gpus == fresh:
            return
        self._gpus = fresh
        if self._path is None:
            return
        try:
            _write(self._path, self._gpus)
        except OSError as error:  # the ranks of this node do not depend on it
            log.warning("the GPUs of this node are not remembered: %s", error)

    def lost(self, gpus: Sequence[pb.Gpu]) -> list[pb.Gpu]:
        """Those that were here and are not among these any more."""
        here = {gpu.uuid for gpu in gpus}
        found = []
        for uuid, gpu in self._gpus.items():
            if uuid not in here:
                found.append(pb.Gpu(lost=True))
                found[-1].MergeFrom(gpu)
        return found


def _missed(gpu: pb.Gpu) -> pb.Gpu:
    """It may have been lost at any time since the last look, so a process of that time may have seen it."""
    found = pb.Gpu(missed_since_s=host.boottime_s())
    found.MergeFrom(gpu)
    return found


def _identity(gpu: pb.Gpu) -> pb.Gpu:
    """What does not change."""
    return pb.Gpu(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        compute_capability=gpu.compute_capability,
        memory_bytes=gpu.memory_bytes,
        mig=gpu.mig,
        bus_id=gpu.bus_id,
    )


def _read(path: Path) -> dict[str, pb.Gpu]:
    try:
        content = json.loads(path.read_text())
        if content["boot_id"] != host.boot_id():
            return {}
        gpus = [json_format.ParseDict(each, pb.Gpu()) for each in content["gpus"]]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, json_format.ParseError) as error:
        log.warning("%s is not used: %s", path, error)
        return {}
    return {gpu.uuid: gpu for gpu in gpus}


def _write(path: Path, gpus: dict[str, pb.Gpu]) -> None:
    content = {"boot_id": host.boot_id(), "gpus": [json_format.MessageToDict(gpu) for gpu in gpus.values()]}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)
