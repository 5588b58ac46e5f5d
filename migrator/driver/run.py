"""What the driver knows about one move in progress: its participants, what they answered, and where the time went."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

from migrator.cluster import Cluster
from migrator.driver.peers import Peers
from migrator.driver.reporter import Reporter, SpanOf
from migrator.estimate import PHASES, Estimate, Size
from migrator.find_rank import Found
from migrator.quiesce.gates import Gates
from migrator.results import TAKE_OVER, Event, MoveOptions, PhaseTime
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.client import DaemonClient


class Run:
    """One move. The steps read and write it; it does no I/O itself."""

    def __init__(
        self,
        cluster: Cluster,
        options: MoveOptions,
        found: Found,
        source: DaemonClient,
        target: DaemonClient,
        on_event: Callable[[Event], None],
        span: SpanOf | None = None,
    ) -> None:
        self.cluster, self.options, self.found = cluster, options, found
        self.source, self.target = source, target
        self.peers, self.gates = Peers(cluster), Gates(cluster)
        self.reporter = Reporter(on_event, span)
        self.move = options.move or f"m-{secrets.token_hex(6)}"
        self.request = pb.MoveRequest(move=self.move)
        self.reached = 0  # index in TABLE of the step being done
        # what the daemons answered
        self.checks: list[pb.Check] = []
        self.facts = pb.RankFacts()
        self.look = ""  # the source's name for these facts
        self.nodes: list[pb.NodeAddresses] = []
        self.strange: dict[str, pb.Check] = {}  # nodes whose daemon this program does not understand, and the refusal
        self.silent: list[str] = []  # nodes of the cluster that did not say which addresses they have
        self.rewires: list[pb.Rewire] = []  # the rank's connections at preflight
        self.prepared = pb.PrepareReply()
        self.frozen = pb.FreezeReply()
        self.warnings: list[str] = []  # where a slower method was used, before the freeze
        self.precopied_bytes = 0
        self.receipt = b""
        self.token = b""
        self.total_bytes = 0  # sent, as the source counts them in the end
        # where the time went
        self.parts: list[PhaseTime] = []
        self.parts_before_pause = 0  # number of parts, from the start, during which the job ran
        self.gates_closed_at: float | None = None
        self.paused_at: float | None = None
        self.pause_s = 0.0
        self.estimate: Estimate | None = None  # of the pause, from before the move
        self.pause_span: tuple[float, float] | None = None  # when the pause began and ended

    @property
    def source_endpoint(self) -> str:
        return self.cluster.nodes[self.found.node]

    @property
    def target_endpoint(self) -> str:
        return self.cluster.nodes[self.options.to]

    @property
    def description(self) -> pb.MoveDescription:
        """The move, as peers and nodes of the job journal it."""
        return pb.MoveDescription(
            move=self.move,
            rank_uid=self.found.rank.uid,
            job=self.found.rank.job,
            rank=self.found.rank.rank,
            source_node=self.found.node,
            source_endpoint=self.source_endpoint,
            target_node=self.options.to,
            target_endpoint=self.target_endpoint,
            nonce=self.prepared.nonce,
            user_id=self.found.rank.user_id,
            user_ids=self.facts.user_ids,
        )

    @property
    def size(self) -> Size:
        """What is to be copied, as preflight saw it."""
        device_bytes = self.facts.gpu.device_bytes
        return Size(max(0, self.facts.memory_bytes - device_bytes), device_bytes, nccl=self.gates.involved)

    def timing(self) -> pb.Timing:
        """What the pause consisted of, for the predictions of later moves. What was handed over was not copied."""
        handed_bytes = sum(part.bytes for part in self.parts if part.name == TAKE_OVER)
        return pb.Timing(
            phases=[pb.Part(name=one.name, seconds=one.seconds) for one in self.reporter.phases if one.name in PHASES],
            host_bytes=self.size.host_bytes,
            device_bytes=max(0, self.size.device_bytes - handed_bytes),
            predicted_s=self.estimate.pause_s if self.estimate is not None else 0.0,
        )

    def add_parts(self, parts: Iterable[pb.Part]) -> None:
        self.parts += [PhaseTime(part.name, part.seconds, part.bytes) for part in parts]

    def gates_close(self) -> None:
        self.gates_closed_at = time.monotonic()

    def pause_begins(self) -> None:
        self.paused_at = self.paused_at or time.monotonic()

    def pause_ends(self) -> None:
        """Can be called more than once; the last call counts."""
        if self.paused_at is not None:
            self.paused_since(self.paused_at)

    def paused_since(self, began_s: float) -> None:
        ended_s = time.monotonic()
        self.pause_s, self.pause_span = ended_s - began_s, (began_s, ended_s)
