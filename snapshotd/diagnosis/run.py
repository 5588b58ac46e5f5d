"""Answers `Diagnose`: everything at the same time, each part with its own time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.addresses import split_address
from snapshotd.api.client import UnknownMethod
from snapshotd.api.errors import SnapshotError, Usage, Where, WrongState
from snapshotd.config import Config
from snapshotd.diagnosis import interface, probes
from snapshotd.diagnosis.copies import copy_limit
from snapshotd.diagnosis.paths import Paths
from snapshotd.diagnosis.resources import gpus, memory
from snapshotd.moves.node import Node
from snapshotd.net.flows import Address, BadAddress
from snapshotd.preflight.node import program_cpu_features
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.child_process import REAP_S, environment
from snapshotd.selfcheck import kernel
from snapshotd.selfcheck.finding import Finding, State, failed
from snapshotd.selfcheck.local import ADVICE, CHECKS
from snapshotd.selfcheck.spilling import CHECK
from snapshotd.transport.image.spill import KEY
from snapshotd.transport.routes import routes_to

LIMIT_S, LONGEST_S = 9.5, 600.0
#: The parts of the limit for one call to another daemon, for all connections to others, and for all checks of this node.
CALL, ROUTES, CHECKS_PART = 0.3, 0.5, 0.7
#: What an operator asks beyond this is left out: no cluster has as many.
MAX_PEERS, MAX_PATHS = 1024, 64
#: Connections that are tried at the same time, each in a thread.
_AT_ONCE = 64
_LINE_BYTES = 1 << 20


class Diagnosis:
    def __init__(self, node: Node) -> None:
        self.node = node
        hosts = [split_address(address)[0] for address in (node.config.advertise, node.config.listen)]
        self.probes = probes.Probes(hosts, node.config.data_addresses)
        self.paths = Paths()
        self._one = asyncio.Lock()  # a second operator waits: parts are not started twice at the same time

    async def open_probe(self, request: pb.OpenProbeRequest) -> pb.OpenProbeReply:
        if not request.address:
            return await in_thread(self.probes.open)
        try:
            address, far = Address(request.address, 0), Address(request.far.ip, request.far.port)
            if not far.port or any(end.loopback or end.wildcard or end.link_local for end in (address, far)):
                raise BadAddress(f"no path between nodes leads from {far} to {address.ip}")
            return await in_thread(self.paths.open, address.ip, far)
        except BadAddress as error:
            raise Usage(f"a path cannot be tried: {error}") from error
        except OSError as error:
            raise WrongState(
                f"nothing can be opened at {request.address} on {self.node.config.node}: {error.strerror or error}",
                where=Where.SOURCE_RUNNING,
            ) from error

    def close(self) -> None:
        """Blocks."""
        self.probes.close()
        self.paths.close()

    async def run(
        self, request: pb.DiagnoseRequest, describe: Callable[[], Awaitable[pb.NodeInfo]]
    ) -> pb.DiagnoseReply:
        config = self.node.config
        limit_s = min(request.limit_s, LONGEST_S) if request.limit_s > 0 else LIMIT_S
        async with self._one:
            (findings, paths), routes, mtu, info, limit = await asyncio.gather(
                local(config, list(request.paths[:MAX_PATHS]), limit_s * CHECKS_PART),
                self._routes(request.peers[:MAX_PEERS], limit_s),
                in_thread(interface.mtu_of, split_address(config.advertise)[0]),
                describe(),
                in_thread(copy_limit, config),
            )
        return pb.DiagnoseReply(
            findings=[
                pb.Diagnosis(check=each.check, state=each.state, text=each.text, remedy=each.remedy)
                for each in (*findings, *gpus(info), *memory(info), *limit, *_unused_disk(self.node))
            ],
            routes=routes,
            paths=paths,
            mtu=mtu,
            cpu_features=program_cpu_features(),
        )

    async def _routes(self, peers: Sequence[pb.PeerNode], limit_s: float) -> list[pb.Route]:
        if not peers:
            return []
        turns = asyncio.Semaphore(_AT_ONCE)
        tasks = {asyncio.create_task(self._route(peer, turns, limit_s * CALL)): peer for peer in peers}
        done, late = await asyncio.wait(tasks, timeout=limit_s * ROUTES)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        silent = [
            pb.Route(peer=tasks[task].name, control=f"no answer within {limit_s * ROUTES:.3g} s") for task in late
        ]
        return [*(task.result() for task in done), *silent]

    async def _route(self, peer: pb.PeerNode, turns: asyncio.Semaphore, call_s: float) -> pb.Route:
        try:
            async with self.node.client(peer.name, peer.endpoint) as client:
                reply = await client.node.OpenProbe(pb.OpenProbeRequest(), timeout_s=call_s)
            routes = routes_to(peer.endpoint, reply.port, reply.endpoints, self.node.config.data_addresses)
        except UnknownMethod:
            return pb.Route(peer=peer.name, data="its daemon is too old to open a port for this")
        except SnapshotError as error:
            return pb.Route(peer=peer.name, control=error.headline)
        async with turns:
            return pb.Route(peer=peer.name, data=await in_thread(probes.connect_all, routes, reply.key, call_s))


def _unused_disk(node: Node) -> list[Finding]:
    """A disk that works now, but did not when the daemon started."""
    if not node.store.why:
        return []
    text = f"snapshotd does not use {KEY}: when it was started, {node.store.why}"
    return [failed(CHECK, text, "mend that, then restart snapshotd")]


async def local(config: Config, paths: list[str], limit_s: float) -> tuple[list[Finding], list[pb.PathFacts]]:
    """The results of snapshotd/selfcheck/local.py. What it does not answer in time is a finding, too."""
    asked = {
        "criu": config.criu,
        "criu_version": config.criu_version,
        "image_dir": str(config.image_dir),
        "snapshot_spill_dir": config.snapshot_spill_dir,
        "tls": {name: str(getattr(config.credentials, name)) for name in ("ca", "cert", "key")},
        "paths": paths,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "snapshotd.selfcheck.local"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment(site_packages=True),
        cwd="/",
        start_new_session=True,
        limit=_LINE_BYTES,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asked).encode())
    process.stdin.close()
    answers = []
    try:
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(limit_s):
                while line := await process.stdout.readline():
                    answers.append(json.loads(line))
    finally:  # also if the caller has gone
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own children, too
        with contextlib.suppress(TimeoutError):  # asyncio reaps it later, should it hang in the kernel
            async with asyncio.timeout(REAP_S):
                await process.wait()
        await in_thread(kernel.remove_cgroup, process.pid)
    found = {path: pb.PathFacts(path=path, file_system="?", source="does not answer") for path in paths}
    found |= {each["path"]: pb.PathFacts(**each) for each in answers if "path" in each}
    findings = [Finding(**{**each, "state": State(each["state"])}) for each in answers if "check" in each]
    findings += [
        failed(name, f"no result within {limit_s:.3g} s", ADVICE)
        for name in set(CHECKS) - {each.check for each in findings}
    ]
    return sorted(findings, key=lambda each: CHECKS.index(each.check)), list(found.values())
