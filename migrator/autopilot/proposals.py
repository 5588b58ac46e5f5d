"""What the autopilot proposes and an operator answers, as it is stored.

Invariant: a proposal is recorded once for each cause, with its reason, and every answer with the name of the operator. It
ends when its cause has gone: an answer is never used for another cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import msgspec

from migrator.autopilot.database import Database, Transaction
from migrator.autopilot.model import Proposal, ProposalState
from snapshotd.api.errors import NotFound, WrongState

_OPEN = "SELECT data FROM proposals WHERE ended_unix_s = 0 ORDER BY id"


class Proposals(Database):
    """A part of the store."""

    async def proposals(self) -> tuple[Proposal, ...]:
        """Those whose cause is still there, answered or not."""
        return tuple(msgspec.json.decode(row["data"], type=Proposal) for row in await self._all(_OPEN))

    async def set_proposals(self, wanted: Mapping[str, Proposal], *, end_others: bool = True) -> tuple[Proposal, ...]:
        """Records what is proposed now, by key, and ends what is not any more. Returns those whose cause is still there."""
        known = await self.proposals()
        gone = [one for one in known if one.key not in wanted] if end_others else []
        new = [one for key, one in wanted.items() if all(key != other.key for other in known)]
        if not gone and not new:
            return known

        def change(tx: Transaction) -> tuple[Proposal, ...]:
            here = {one.key: one for one in _known(tx)}
            for proposal in gone:
                if proposal.key in here:
                    _end(tx, here[proposal.key], self.now())
            row = tx.one("SELECT max(id) AS last FROM proposals")
            last = int(row["last"] or 0) if row else 0
            for number, proposal in enumerate((one for one in new if one.key not in here), last + 1):
                made = replace(proposal, id=number, since_unix_s=self.now())
                tx.execute("INSERT INTO proposals VALUES (?, 0, ?)", (made.id, msgspec.json.encode(made).decode()))
                tx.append("proposal", f"proposal {made.id}: {made.what}: {made.why}", node=made.node, data=asdict(made))
            return _known(tx)

        return await self._change(change)

    async def answer_proposal(self, number: int, approved: bool, by: str, reason: str = "") -> Proposal:
        """Records an operator's answer, which may replace an earlier one. Raises NotFound, or WrongState if the proposal has
        ended or was answered the same way."""

        def change(tx: Transaction) -> Proposal:
            row = tx.one("SELECT data FROM proposals WHERE id = ?", number)
            if row is None:
                raise NotFound(f"there is no proposal {number}", remedy="`migrator proposals` lists them")
            known = msgspec.json.decode(row["data"], type=Proposal)
            if known.ended_unix_s:
                raise WrongState(
                    f"proposal {number} ({known.what}) has ended: its cause has gone",
                    remedy="nothing needs to be done; `migrator proposals` lists those that are open",
                )
            state = ProposalState.APPROVED if approved else ProposalState.REJECTED
            if known.state is state:
                raise WrongState(f"proposal {number} ({known.what}) was {state} by {known.by} already")
            answered = replace(known, state=state, by=by, reason=reason, answered_unix_s=self.now())
            _update(tx, answered)
            text = f"{by} {state} proposal {number}: {known.what}" + (f": {reason}" if reason else "")
            data = {"id": number, "state": state.value, "by": by, "reason": reason}
            tx.append("proposal-answered", text, node=known.node, data=data)
            return answered

        return await self._change(change)


def _known(tx: Transaction) -> tuple[Proposal, ...]:
    return tuple(msgspec.json.decode(row["data"], type=Proposal) for row in tx.all(_OPEN))


def _end(tx: Transaction, proposal: Proposal, now: float) -> None:
    lapsed = proposal.state is ProposalState.OPEN
    state = ProposalState.LAPSED if lapsed else proposal.state
    _update(tx, replace(proposal, state=state, ended_unix_s=now))
    text = f"proposal {proposal.id} ({proposal.what}) {'lapsed' if lapsed else 'ended'}: its cause has gone"
    tx.append("proposal-ended", text, node=proposal.node, data={"id": proposal.id, "state": state.value})


def _update(tx: Transaction, proposal: Proposal) -> None:
    data = msgspec.json.encode(proposal).decode()
    tx.execute(
        "UPDATE proposals SET ended_unix_s = ?, data = ? WHERE id = ?", (proposal.ended_unix_s, data, proposal.id)
    )
