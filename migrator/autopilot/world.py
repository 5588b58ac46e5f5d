"""Everything that the autopilot knows about a cluster at one moment, with ways to look it up. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from migrator.autopilot.model import Alarm, Move, MoveState, Node, Order, Proposal, Rank
from migrator.autopilot.suspension import Suspension


@dataclass(frozen=True)
class World:
    """Everything that a decision may depend on, besides the policy and the time."""

    nodes: Mapping[str, Node]
    alarms: tuple[Alarm, ...] = ()
    ranks: tuple[Rank, ...] = ()
    moves: tuple[Move, ...] = ()  # those in progress, and those of the longest window
    orders: tuple[Order, ...] = ()  # open ones
    proposals: tuple[Proposal, ...] = ()  # those whose cause is still there, answered or not
    suspensions: tuple[Suspension, ...] = ()  # of jobs, by the autopilot: those that are not over, and recent ones

    def proposal(self, key: str) -> Proposal | None:
        return next((proposal for proposal in self.proposals if proposal.key == key), None)

    @property
    def running(self) -> list[Move]:
        return [move for move in self.moves if move.state is MoveState.INTENDED]

    @cached_property
    def shifts(self) -> tuple[Move, ...]:
        """What suspended jobs have freed, and what those that are resumed will take."""
        return tuple(move for one in self.suspensions for move in one.moves())

    def ranks_on(self, node: str) -> Sequence[Rank]:
        return self._ranks_by_node.get(node, ())

    def alarms_on(self, node: str) -> Sequence[Alarm]:
        return self._alarms_by_node.get(node, ())

    def ranks_of(self, job_key: str) -> Sequence[Rank]:
        return self._ranks_by_job.get(job_key, ())

    @cached_property
    def _ranks_by_job(self) -> Mapping[str, Sequence[Rank]]:
        found: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            found.setdefault(rank.job_key, []).append(rank)
        return found

    @cached_property
    def _ranks_by_node(self) -> Mapping[str, Sequence[Rank]]:
        found: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            found.setdefault(rank.node, []).append(rank)
        return found

    @cached_property
    def _alarms_by_node(self) -> Mapping[str, Sequence[Alarm]]:
        found: dict[str, list[Alarm]] = {}
        for alarm in self.alarms:
            found.setdefault(alarm.node, []).append(alarm)
        return found

    def order_for(self, node: str) -> Order | None:
        """The order that empties the node, if there is one."""
        return next((order for order in self.orders if order.node == node and order.empties), None)

    def order_to_move(self, rank: Rank) -> Order | None:
        """The order that asks for this rank to leave its node, if there is one."""
        asked = (rank.uid, rank.node)
        return next((one for one in self.orders if one.kind == "move" and (one.rank_uid, one.node) == asked), None)
