"""What a daemon answers to `Diagnose`: its own parts in a process that can be killed, and ports that are tried."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import UnknownMethod
from snapshotd.api.errors import Unreachable, Usage
from snapshotd.diagnosis import interface, probes, run
from snapshotd.diagnosis.probes import Probes
from snapshotd.diagnosis.resources import gpus, memory
from snapshotd.proc import stat
from snapshotd.selfcheck import kernel
from snapshotd.selfcheck.finding import Finding, State
from snapshotd.selfcheck.local import CHECKS
from tests.daemon.test_config import fake_criu
from tests.served import Certificates

GIB = 1 << 30


@pytest.fixture
def port() -> Iterator[Probes]:
    made = Probes(["127.0.0.1"])
    yield made
    made.close()


def test_a_connection_with_the_key_arrives(port: Probes) -> None:
    reply = port.open()
    assert probes.connect("127.0.0.1", reply, 60.0) == ""
    assert port.open() == reply, "one port for all that ask at about the same time"


def test_a_connection_without_the_key_gets_nothing(port: Probes) -> None:
    wrong = pb.OpenProbeReply(port=port.open().port, key=bytes(32))
    assert "something on the way answers for the node" in probes.connect("127.0.0.1", wrong, 60.0)


def test_a_closed_port_is_named(port: Probes) -> None:
    reply = port.open()
    port.close()
    assert probes.connect("127.0.0.1", reply, 60.0) == "Connection refused"


def test_a_path_that_loses_large_packets_is_named() -> None:
    """A peer that takes what is sent and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []
        thread = threading.Thread(target=lambda: kept.append(server.accept()[0]))
        thread.start()
        found = probes.connect("127.0.0.1", pb.OpenProbeReply(port=server.getsockname()[1], key=bytes(32)), 0.3)
        thread.join()
        kept[0].close()
    assert "the MTU of the path may be too small" in found


def config(folder: Path, certificates: Certificates) -> Any:
    return SimpleNamespace(
        criu=str(fake_criu(folder)),
        criu_version="4.2.1",
        image_dir=Path("/dev/shm"),
        snapshot_spill_dir="",
        credentials=certificates.node,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="snapshotd runs as root only")
async def test_every_check_has_a_result(tmp_path: Path, certificates: Certificates) -> None:
    findings, paths = await run.local(config(tmp_path, certificates), ["/proc", "/nowhere"], 120.0)
    assert {found.check for found in findings} == set(CHECKS)
    facts = {each.path: each.file_system for each in paths}
    assert facts == {"/proc": "proc", "/nowhere": ""}


@pytest.mark.skipif(os.geteuid() != 0, reason="snapshotd runs as root only")
async def test_a_check_that_hangs_is_named_and_the_others_are_not_lost(
    tmp_path: Path, certificates: Certificates
) -> None:
    hanging = config(tmp_path, certificates)
    Path(hanging.criu).write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 600\n")
    states: dict[str, Finding] = {}
    for limit_s in (5, 20, 80):  # a busy machine needs more for the other checks
        findings, _ = await run.local(hanging, [], limit_s)
        states = {found.check: found for found in findings}
        assert states["criu"].state is State.FAILED
        assert states["criu"].text == f"no result within {limit_s} s"
        if states["kernel"].state is State.OK and (tmp_path / "pid").exists():
            break
    assert states["kernel"].state is State.OK
    with contextlib.suppress(FileNotFoundError):  # killed with the process that waited for it; perhaps not reaped yet
        assert stat.read(int((tmp_path / "pid").read_text())).dead


@pytest.mark.skipif(os.geteuid() != 0, reason="snapshotd runs as root only")
async def test_the_process_of_the_checks_ends_if_the_caller_goes(tmp_path: Path, certificates: Certificates) -> None:
    hanging = config(tmp_path, certificates)
    Path(hanging.criu).write_text(
        f"#!/bin/sh\necho $$ >{tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid\nexec sleep 600\n"
    )
    asked = asyncio.create_task(run.local(hanging, [], 600.0))
    while not (tmp_path / "pid").exists():
        assert not asked.done()
        await asyncio.sleep(0.05)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    with contextlib.suppress(FileNotFoundError):
        async with asyncio.timeout(60):  # it was killed, but a busy machine may not have ended it yet
            while not stat.read(int((tmp_path / "pid").read_text())).dead:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_process_of_the_checks_that_cannot_be_killed_does_not_stop_later_diagnoses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certificates: Certificates
) -> None:
    """It may wait for a file system (FUSE) whose server has taken its question and never answers."""
    never = asyncio.Event()

    async def wait(_: asyncio.subprocess.Process) -> int:
        await never.wait()
        return 0

    monkeypatch.setattr(asyncio.subprocess.Process, "wait", wait)
    monkeypatch.setattr(run, "REAP_S", 0.1)
    async with asyncio.timeout(300):
        findings, _ = await run.local(config(tmp_path, certificates), [], 0.1)
    assert {found.check for found in findings} == set(CHECKS)


class Peer:
    """Another daemon, whose answer to OpenProbe is `answer`."""

    def __init__(self, answer: Callable[[], Awaitable[pb.OpenProbeReply]]) -> None:
        async def open_probe(request: pb.OpenProbeRequest, timeout_s: float) -> pb.OpenProbeReply:
            return await answer()

        self.node = SimpleNamespace(OpenProbe=open_probe)

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_routes_say_which_port_fails_and_why(port: Probes) -> None:
    async def works() -> pb.OpenProbeReply:
        return port.open()

    async def hangs() -> pb.OpenProbeReply:
        await asyncio.Event().wait()
        raise AssertionError

    async def is_old() -> pb.OpenProbeReply:
        raise UnknownMethod("does not know OpenProbe")

    async def is_down() -> pb.OpenProbeReply:
        raise Unreachable("does not answer\nmore lines")

    async def has_a_dead_interface() -> pb.OpenProbeReply:
        reply = port.open()
        return pb.OpenProbeReply(key=reply.key, endpoints=[f"127.0.0.1:{reply.port}", f"127.0.0.9:{unheard_port}"])

    async def talks_nonsense() -> pb.OpenProbeReply:
        return pb.OpenProbeReply(endpoints=["nowhere"])

    unheard = socket.socket()
    unheard.bind(("127.0.0.9", 0))  # and does not listen
    unheard_port = unheard.getsockname()[1]
    peers = {"works": works, "hangs": hangs, "old": is_old, "down": is_down}
    peers |= {"half": has_a_dead_interface, "odd": talks_nonsense}
    node: Any = SimpleNamespace(
        config=SimpleNamespace(advertise="127.0.0.1:7070", listen="127.0.0.1:7070", data_addresses=()),
        client=lambda name, endpoint: Peer(peers[name]),
    )
    asked = [pb.PeerNode(name=name, endpoint="127.0.0.1:7070") for name in peers]
    with unheard:
        routes = {
            route.peer: (route.control.partition(", like")[0], route.data)
            for route in await run.Diagnosis(node)._routes(asked, 20.0)
        }
    assert routes == {
        "works": ("", ""),
        "hangs": ("no answer within 10 s", ""),
        "old": ("", "its daemon is too old to open a port for this"),
        "down": ("does not answer", ""),
        "half": ("", "127.0.0.9: Connection refused"),
        "odd": ("it announces an address for data that is none: 'nowhere' is not an address with a port", ""),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups are root's")
def test_the_cgroup_of_a_killed_check_is_removed() -> None:
    left = kernel.check_cgroup(os.getpid()).create()
    kernel.remove_cgroup(os.getpid())
    assert not left.exists()
    kernel.remove_cgroup(os.getpid())


def test_persistence_mode_and_memory_are_judged() -> None:
    gpu = pb.Gpu(index=0, memory_bytes=80 * GIB, persistence=False)
    info = pb.NodeInfo(gpus=[gpu], driver_version="580", memory_available_bytes=64 * GIB, image_capacity_bytes=64 * GIB)
    assert [(found.check, found.state) for found in gpus(info)] == [("gpu", State.OK), ("persistence", State.WARNING)]
    assert memory(info)[0].state is State.WARNING
    assert "hold_device_memory" in memory(info)[0].remedy
    info.device_window_bytes = GIB
    assert memory(info)[0].state is State.OK
    info.image_held_bytes = info.image_capacity_bytes
    assert memory(info)[0].state is State.WARNING
    info.device_window_bytes = info.image_held_bytes = 0
    info.gpus[0].persistence = True
    info.gpus[0].memory_bytes = 40 * GIB
    assert [found.state for found in (*gpus(info), *memory(info))] == [State.OK, State.OK]
    info.gpus[0].ClearField("persistence")
    info.gpus[0].mig = True
    assert [found.check for found in gpus(info)] == ["gpu", "mig"]
    assert gpus(pb.NodeInfo(gpu_problem="NVML hangs"))[0].state is State.FAILED


def test_the_mtu_of_an_address_is_found() -> None:
    assert interface.mtu_of("127.0.0.1") > 1280
    assert interface.mtu_of("192.0.2.77") == 0
    assert interface.mtu_of("a-name") == 0


@pytest.mark.parametrize(
    ("address", "ip", "port"),
    [
        *[(address, "10.0.0.1", 5) for address in ("localhost", "a\0b", "127.0.0.1", "0.0.0.0", "::", "fe80::1")],
        *[("10.0.0.2", ip, port) for ip, port in (("", 5), ("10.0.0.1", 0), ("10.0.0.1", 70000), ("127.0.0.1", 22))],
    ],
)
async def test_path_between_other_addresses_than_those_of_nodes_is_not_tried(address: str, ip: str, port: int) -> None:
    config = SimpleNamespace(node="node-1", advertise="127.0.0.1:1", listen="127.0.0.1:1", data_addresses=())
    request = pb.OpenProbeRequest(address=address, far=pb.Endpoint(ip=ip, port=port))
    with pytest.raises(Usage):
        await run.Diagnosis(cast(Any, SimpleNamespace(config=config))).open_probe(request)
