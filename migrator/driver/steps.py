"""One function per step of the table: asks the daemons for it and keeps what they answer.

Each function raises a SnapshotError if its step failed or its answer was lost; the rank may then be on either side of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from migrator import asked_rank, formatting
from migrator.driver.peers import node_addresses, node_infos
from migrator.driver.run import Run
from migrator.protocol import PREPARE, TABLE, Step
from migrator.results import PhaseTime
from snapshotd import __version__
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import UnknownMethod
from snapshotd.api.errors import NotFound, RankGone, Refused, SnapshotError, Undone, Where

#: How long to wait for the source to clean up after a rank that already runs on the target; the source may be dead.
RELEASE_S = 15.0

#: The source's warning of connections that will be reset.
OUTSIDE_WORLD = "outside-world"

StepFunction = Callable[[Run, float], Awaitable[None]]


async def perform(run: Run, step: Step, timeout_s: float) -> None:
    """Does one step. The steps for NCCL are skipped for a rank in which it has nothing to take down."""
    if step.action == "Quiesce":  # it may have created or destroyed communicators since preflight
        await run.gates.find(run.description)
    if step.only_with_nccl and not run.gates.involved:
        return
    with run.reporter.phase(step.phase, step.action):
        await STEPS[step.action](run, timeout_s)


# ---------------------------------------------------------------------- preflight


async def preflight(run: Run) -> None:
    """All steps of preflight. What they found is in `run.checks`."""
    with run.reporter.phase("preflight", "ask all nodes"):
        infos = await node_infos(run.cluster)
        _refuse_other_versions(run, infos)
        _refuse_wrong_networks(run, infos)
        run.nodes = await node_addresses(run.cluster, infos)
        run.silent = [node for node in run.cluster.nodes if node not in infos]
    for run.reached, step in enumerate(TABLE[:PREPARE]):
        await perform(run, step, step.timeout_s)


def _refuse_other_versions(run: Run, infos: Mapping[str, pb.NodeInfo]) -> None:
    """Before any other call, because a daemon of another version may not know it, or may understand it differently."""
    run.strange = {node: check for node, info in infos.items() if (check := _of_other_version(node, info)) is not None}
    run.checks += [run.strange[node] for node in (run.found.node, run.options.to) if node in run.strange]
    refuse_if_checks_do(run)


def _of_other_version(node: str, info: pb.NodeInfo) -> pb.Check | None:
    there, here = f"snapshotd {info.version} on {node}", f"migrator {__version__}"
    check = protocol.check(there, info.protocol, here, protocol.own())
    return check if check.verdict == pb.Check.REFUSE else None


def _refuse_wrong_networks(run: Run, infos: Mapping[str, pb.NodeInfo]) -> None:
    """An address that the node does not have is a mistake in cluster.toml: without it another one would be chosen."""
    for node in (run.found.node, run.options.to):
        own = {text.partition("/")[0] for text in infos[node].addresses} if node in infos else set[str]()
        for network, ip in run.cluster.networks.get(node, {}).items():
            if own and ip not in own:
                run.checks.append(
                    pb.Check(
                        name="new-addresses",
                        verdict=pb.Check.REFUSE,
                        reason=f"{ip}, the address of {node} in the network {network}, is not among its addresses:"
                        f" {', '.join(sorted(own)[:10])}",
                        remedy=f"correct nodes.{node}.networks.{network} in {run.cluster.origin}",
                    )
                )
    refuse_if_checks_do(run)


def refuse_if_checks_do(run: Run) -> None:
    refused = [check for check in run.checks if check.verdict == pb.Check.REFUSE]
    if refused:
        listed = "\n".join(f"  {check.name}: {check.reason}\n    remedy: {check.remedy}" for check in refused)
        options = run.options
        raise Refused(f"rank {options.rank} cannot move to {options.to}:\n{listed}", where=Where.SOURCE_RUNNING)


async def inspect(run: Run, timeout_s: float) -> None:
    request = pb.InspectRequest(
        rank_uid=run.found.rank.uid,
        nodes=run.nodes,
        target_node=run.options.to,
        protocol=protocol.own(),
        move=run.move if run.reporter.tracing else "",
    )
    inspected = await run.source.source.Inspect(request, timeout_s=timeout_s)
    asked_rank.must_be(inspected.facts.rank, run.found.rank, run.found.node)
    run.facts, run.checks = inspected.facts, list(inspected.checks)
    run.rewires, run.look = list(inspected.rewires), inspected.look
    _refuse_unknown_hosts(run)


def _refuse_unknown_hosts(run: Run) -> None:
    """A connection to a host of no known node is reset in the move. It may lead to a node that does not answer, of which only
    the endpoint is known: a node has other addresses, and resetting its ranks' connections would kill the job."""
    hosts = sorted({rewire.old_remote.ip for rewire in run.rewires if rewire.kind == pb.Rewire.OUTSIDE})
    if not run.silent or not hosts:
        return
    run.checks = [check for check in run.checks if check.name != OUTSIDE_WORLD]
    run.checks.append(
        pb.Check(
            name=OUTSIDE_WORLD,
            verdict=pb.Check.REFUSE,
            reason=f"{', '.join(run.silent)} did not answer, so it is not known whether these hosts are among its addresses:"
            f" {', '.join(hosts[:10])}",
            remedy="start the daemon there, or remove the node from cluster.toml; then retry",
        )
    )


async def examine(run: Run, timeout_s: float) -> None:
    move = run.move if run.reporter.tracing else ""
    request = pb.ExamineRequest(facts=run.facts, rewires=run.rewires, gpu=run.options.gpu, move=move)
    run.checks += (await run.target.target.Examine(request, timeout_s=timeout_s)).checks


async def inspect_connections(run: Run, timeout_s: float) -> None:
    """The peers' checks, and those of the job's NCCL gates."""
    run.checks += await run.peers.check(run.description, run.rewires, timeout_s)
    run.checks += await run.gates.check(run.description)
    others = {*run.peers.rewires, *(run.gates.nodes if run.gates.involved else ())}
    run.checks += [run.strange[node] for node in sorted(others & run.strange.keys())]


# ---------------------------------------------------------------------- prepare


async def prepare(run: Run, timeout_s: float) -> None:
    request = pb.PrepareRequest(
        move=run.move, facts=run.facts, source_endpoint=run.source_endpoint, gpu=run.options.gpu
    )
    run.prepared = await run.target.target.Prepare(request, timeout_s=timeout_s)


async def begin(run: Run, timeout_s: float) -> None:
    request = pb.BeginRequest(
        move=run.move,
        rank_uid=run.found.rank.uid,
        target_node=run.options.to,
        target_endpoint=run.target_endpoint,
        nonce=run.prepared.nonce,
        lease_s=run.options.lease_s,
        nodes=run.nodes,
        look=run.look,
    )
    try:
        await run.source.source.Begin(request, timeout_s=timeout_s)
    except NotFound as error:
        raise RankGone(f"rank {run.options.rank} ended: {error.message}", where=Where.ENDED) from error


async def prepare_device(run: Run, timeout_s: float) -> None:
    try:
        request = pb.MoveRequest(move=run.move, precopy_percent=run.options.precopy_percent)
        reply = await run.source.source.PrepareDevice(request, timeout_s=timeout_s)
    except UnknownMethod as error:  # an older daemon prepares in Freeze
        run.reporter.note(f"the source runs an older version, so the pause will be longer: {error.message}")
        return
    run.add_parts(reply.parts)
    run.precopied_bytes = reply.precopied_bytes
    for warning in reply.warnings:
        run.warnings.append(warning)
        run.reporter.note(warning)
    run.parts_before_pause = len(run.parts)


async def suspend_timeouts(run: Run, timeout_s: float) -> None:
    await run.peers.suspend_timeouts(run.description, timeout_s)


# ---------------------------------------------------------------------- from the pause to COMMIT


async def quiesce(run: Run, timeout_s: float) -> None:
    run.gates_close()
    await run.gates.quiesce(run.description, min(timeout_s, run.options.quiesce_timeout_s))


async def detach(run: Run, timeout_s: float) -> None:
    run.pause_begins()  # from the cut on the whole job waits
    await run.source.source.Detach(run.request, timeout_s=timeout_s)


async def freeze(run: Run, timeout_s: float) -> None:
    run.pause_begins()
    run.frozen = await run.source.source.Freeze(run.request, timeout_s=timeout_s)
    run.peers.set_connections(run.frozen.rewires)
    run.add_parts(run.frozen.parts)
    for warning in run.frozen.warnings:
        run.reporter.note(warning)


async def hold(run: Run, timeout_s: float) -> None:
    await run.peers.hold(run.description, timeout_s)


async def stream(run: Run, timeout_s: float) -> None:
    last = pb.Progress()
    async for progress in run.source.source.Stream(run.request, timeout_s=timeout_s):
        run.reporter.sent("stream", progress.bytes_sent, progress.bytes_expected)
        last = progress
    in_stripes = sum(part.bytes for part in run.frozen.parts if part.name == "offload")
    dumped_bytes = max(0, last.bytes_expected - in_stripes)
    run.parts.append(PhaseTime("criu-dump", last.dump_seconds, dumped_bytes))
    run.parts.append(PhaseTime("stream", last.stream_seconds, last.bytes_sent))


async def restore(run: Run, timeout_s: float) -> None:
    restored = await run.target.target.Restore(run.request, timeout_s=timeout_s)
    run.receipt = restored.held_receipt
    run.add_parts(restored.parts)


async def attach(run: Run, timeout_s: float) -> None:
    await run.source.source.Attach(run.request, timeout_s=timeout_s)


async def repoint(run: Run, timeout_s: float) -> None:
    await run.peers.repoint(run.description, timeout_s)


# ---------------------------------------------------------------------- from COMMIT on


async def commit(run: Run, timeout_s: float) -> None:
    request = pb.CommitRequest(move=run.move, held_receipt=run.receipt)
    outcome = await run.source.source.Commit(request, timeout_s=timeout_s)
    if outcome.kind != pb.COMMIT:
        raise Undone(f"the source decided {formatting.name_of(pb.OutcomeKind, outcome.kind)}: {outcome.reason}")
    run.token = outcome.token


async def activate(run: Run, timeout_s: float) -> None:
    request = pb.TokenRequest(move=run.move, token=run.token)
    reply = await run.target.target.Activate(request, timeout_s=timeout_s, retry=True)
    if not reply.running:
        raise RankGone("the target's copy died before it could run", where=Where.SOURCE_FROZEN)
    run.pause_ends()


async def open_gates(run: Run, timeout_s: float) -> None:
    """Does not fail: the rank already runs, and a node that cannot be reached now asks the source and opens its gates."""
    late = await run.gates.open(run.move, run.token, timeout_s)
    for reason in late:
        run.reporter.note(f"gates open later on {reason}")
    if not late:
        run.pause_ends()


async def settle(run: Run, timeout_s: float) -> None:
    await run.peers.settle(run.move, run.token, timeout_s)


async def release(run: Run, timeout_s: float) -> None:
    """Does not fail: the rank already runs, and a source that cannot clean up now does so later without the driver."""
    try:
        request = pb.MoveRequest(move=run.move, pause_s=run.pause_s, timing=run.timing())
        reply = await run.source.source.Release(request, timeout_s=min(timeout_s, RELEASE_S), retry=True)
        if reply.released:  # only now does the source know how much of the device memory was zero and not sent
            run.total_bytes = reply.bytes
    except SnapshotError as error:
        run.reporter.note(f"the source cleans up later: {error.message}")


STEPS: dict[str, StepFunction] = {
    "Inspect": inspect,
    "Examine": examine,
    "InspectConnections": inspect_connections,
    "Prepare": prepare,
    "Begin": begin,
    "PrepareDevice": prepare_device,
    "SuspendTimeouts": suspend_timeouts,
    "Quiesce": quiesce,
    "Detach": detach,
    "Freeze": freeze,
    "Hold": hold,
    "Stream": stream,
    "Restore": restore,
    "Attach": attach,
    "Repoint": repoint,
    "Commit": commit,
    "Activate": activate,
    "Open": open_gates,
    "Settle": settle,
    "Release": release,
}
assert STEPS.keys() == {step.action for step in TABLE}, "the table and its functions differ"
