"""Leases of coordinators and their succession in the model of jobs. The decisions are those of `job_rules.py`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast

from migrator.jobs import buddies
from snapshotd.moves import job_rules
from snapshotd.moves.job_rules import Former
from snapshotd.moves.rules import Mark, Outcome
from tests.protocol.job_rolling import Rolling
from tests.protocol.job_world import NODES, Died, Lost, Record, Refused

if TYPE_CHECKING:
    from tests.protocol.job_model import JobModel


class Succeeding(Rolling):
    # ------------------------------------------------------------ the coordinator

    def begin_lease(self, node: str, name: str) -> None:
        """A snapshot begins: the nodes that keep its images follow its coordinator, and witnesses that it can ask."""
        record = self.journal[node, name]
        keepers = list(dict.fromkeys([node, *(at for at, _ in record.places)]))
        usable = [one for one in NODES if self.up[one] and not self.apart(node, one)]
        record.voters = tuple(sorted({*keepers, *buddies.witnesses(keepers, usable, len(record.copies[0]))}))
        for voter in record.voters:
            if self.up[voter] and not self.apart(node, voter):
                self.follows.setdefault((voter, name), node)

    def led(self, node: str) -> list[tuple[str, Record]]:
        """The snapshots that a node coordinates."""
        return [
            (name, record)
            for (at, name), record in self.journal.items()
            if at == node
            and record.voters
            and record.outcome is Outcome.COMMIT
            and not record.handed_to
            and not record.dropped
        ]

    def has_lease(self, node: str) -> bool:
        """Whether enough nodes answer a coordinator now that they follow it."""
        for name, record in self.led(node):
            heard = {v: 0.0 for v in record.voters if self.follows.get((v, name)) == node and not self.apart(node, v)}
            heard = {v: at for v, at in heard.items() if self.up[v] or v not in self.off}
            if not job_rules.holds_lease([record.voters], heard, 0.0, self.declared):
                return False
        return True

    def leases_lapse(self) -> None:
        for node in NODES:
            if not self.led(node) or not self.up[node] or self.has_lease(node):
                continue
            self.lapsed.add(node)
            for copy in self.copies:
                if copy.node == node and copy.bound_to in {"", node}:
                    copy.bound_to = node
                    self.over.add((node, copy.incarnation, node))

    def leases_are_renewed(self) -> None:
        for (voter, name), holder in self.follows.items():
            if (holder, name) not in self.journal:  # it has asked to follow it, and asks no more
                self.silent.add((voter, holder))
        for node in NODES:
            if self.up[node]:
                with suppress(Died):
                    self.renew(node)

    def renew(self, node: str) -> None:
        """What a coordinator does every second."""
        for name, record in self.led(node):
            for voter in record.voters:
                with suppress(Lost, Refused):
                    holder = str(self.call(node, voter, "lease", name, node, ""))
                    if holder != node and self.succeeds(node, holder, name):
                        self.step_down(node, holder)
                        return
        if self.has_lease(node):
            self.lapsed.discard(node)

    def succeeds(self, node: str, other: str, name: str) -> bool:
        if self.apart(node, other) or not self.up[other]:
            return False
        theirs = self.journal.get((other, name))
        return theirs is not None and theirs.adopted > self.journal[node, name].adopted

    def step_down(self, node: str, successor: str) -> None:
        for copy in self.copies:
            if copy.node == node and copy.bound_to == node:
                self.over.add((node, copy.incarnation, node))
        self.end_over(node)
        for record in self.records_of(node):
            if record.role != "job":
                continue
            if record.outcome is None:
                self.decide(node, record, Outcome.ABORT)
            elif record.kind == "snapshot" and record.outcome is Outcome.COMMIT:
                self.event(node, "mark handed over")
                record.handed_to = successor
                self.put(node, record, Mark.SETTLED)
            elif record.kind == "rollback" and record.outcome is Outcome.COMMIT:
                self.event(node, "mark dropped")
                record.dropped = True
                self.put(node, record, Mark.SETTLED)
            elif record.suspension and record.outcome is Outcome.COMMIT and not record.ended:
                self.event(node, "overrule: ABORT")
                record.outcome = Outcome.ABORT
                self.put(node, record, Mark.SETTLED)

    # ------------------------------------------------------------ a node that is asked for its promise

    def on_lease(self, node: str, name: str, caller: str, takes: str) -> object:
        holder = self.follows.get((node, name))
        if holder is None:
            raise Refused("it knows no coordinator")
        if holder != caller:
            former = self.former(node, holder, name, caller)
            ago_s = job_rules.FENCED_S if (node, holder) in self.silent else 0.0
            waits = former is Former.SILENT and not takes
            promised = self.begun_at[name] != holder
            if waits or not job_rules.may_promise(former, ago_s, promised_before=promised)[0]:
                return holder
            self.event(node, f"promise to follow {caller}")
            self.follows[node, name] = caller
        elif (record := self.journal.get((caller, name))) is not None and record.ended:
            self.settled.add((node, name))
        return caller

    def former(self, node: str, holder: str, name: str, caller: str) -> Former:
        known = self.journal.get((holder, name))
        left = known is not None and known.handed_to == caller
        if node == holder:
            if known is None:
                return Former.UNKNOWN
            return Former.LEFT if left or node in self.lapsed else Former.THERE
        try:
            self.call(node, holder, "job_outcome", name)
        except Lost:
            return Former.SILENT if self.apart(node, holder) else Former.THERE
        return Former.UNKNOWN if known is None else Former.LEFT if left else Former.THERE

    # ------------------------------------------------------------ the successor

    def on_adopt(self, node: str, name: str, former: str, voters: str) -> object:
        self.must_have_left(node, name, former, node)
        yes, settled = [], False
        for voter in voters.split():
            with suppress(Lost, Refused):
                if self.call(node, voter, "lease", name, node, "takes over") == node:
                    yes.append(voter)
                    settled |= (voter, name) in self.settled
        may, why = job_rules.may_take_over([voters.split()], yes, (), handed_over=False)
        if not may or not settled:
            raise Refused(why)
        self.event(node, "journal the snapshot")
        theirs = self.journal[former, name]
        mine = self.journal.get((node, name)) or Record("job", Mark.SETTLED, outcome=Outcome.COMMIT, kind="snapshot")
        mine.parts, mine.copies, mine.incarnation = theirs.parts, theirs.copies, theirs.incarnation
        mine.voters, mine.ended, mine.handed_to, mine.fenced = tuple(voters.split()), True, "", former
        mine.adopted = theirs.adopted + 1
        self.journal[node, name] = mine
        self.lapsed.discard(node)
        return None

    def must_have_left(self, node: str, name: str, former: str, successor: str) -> None:
        known = self.journal.get((former, name))
        if known is not None and known.handed_to == successor:
            return
        if not self.apart(node, former):
            raise Refused("the former coordinator, or its machine, is there")

    def on_succeed(self, node: str, name: str, former: str, successor: str) -> object:
        bound = [c for c in self.copies if c.node == node and c.alive and c.bound_to == former]
        moves = [
            (move, record)
            for (at, move), record in self.journal.items()
            if at == node and record.role in ("source", "target") and self.coordinator_of(record) == former
        ]
        if not bound and not any(not record.ended or (node, move) in self.kept for move, record in moves):
            return None
        self.must_have_left(node, name, former, successor)
        for move, record in moves:
            if record.outcome is None and not record.ended:
                self.decide(node, record, Outcome.ABORT)
                with suppress(Lost, Refused):
                    model = cast("JobModel", self)
                    (model.settle_store if record.role == "source" else model.settle_target)(node, move)
        for copy in bound:
            if not self.is_over(copy):
                self.event(node, "follow the successor")
                copy.bound_to = successor
        for move, _ in moves:
            self.images_follow[node, move] = successor
        return None
