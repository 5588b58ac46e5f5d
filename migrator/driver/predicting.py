"""Predicts the pause of a move while it is prepared, from the journals of its two nodes.

Invariant: a prediction that cannot be made changes nothing. Nothing waits for it, except for `migrator check --estimate`.
"""

from __future__ import annotations

from migrator import estimate
from migrator.driver.run import Run
from migrator.estimate import Sample, Size
from migrator.fan_out import ASK_TIMEOUT_S, ask_all
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient


async def predict(run: Run) -> None:
    """Sets `run.estimate`. A node that does not answer, or journals no times, contributes nothing."""

    async def ask(client: DaemonClient) -> pb.ListMovesReply:
        return await client.node.ListMoves(pb.ListMovesRequest(timings=True), timeout_s=ASK_TIMEOUT_S)

    source, target = run.found.node, run.options.to
    answers, _ = await ask_all(run.cluster, ask, (source, target))
    samples = [sample(record) for reply in answers.values() for record in reply.moves if record.timing.phases]
    run.estimate = estimate.predict(run.size, source, target, samples)


def sample(record: pb.MoveRecord) -> Sample:
    timing = record.timing
    return Sample(
        frozenset({record.source_node, record.target_node}),
        Size(timing.host_bytes, timing.device_bytes),
        {part.name: max(0.0, part.seconds) for part in timing.phases},
        record.ended_unix_s,
    )
