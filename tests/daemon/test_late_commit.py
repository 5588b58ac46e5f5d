"""A source that has lost its copy commits the target's, and builds the communicators before that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.api.errors import RankGone, SnapshotError, Unreachable
from snapshotd.moves.nccl import communicators
from snapshotd.moves.rules import CopyState, Mark, Outcome, SourceFacts
from snapshotd.moves.source.steps import SourceSteps


class Followed(SourceSteps):
    """Records the order of its operations."""

    def __init__(self, target: CopyState) -> None:
        self.target, self.said = target, list[str]()
        self.failure: SnapshotError | None = None  # of building communicators
        built: Any = SimpleNamespace(attach=self._build)
        self.communicators = built

    async def _build(self, moving: Any, node: str) -> None:
        self.said.append(f"attach on {node}")
        if self.failure is not None:
            raise self.failure

    async def _gather(self, moving: Any) -> SourceFacts:
        if "COMMIT" in self.said:
            return SourceFacts(Mark.SETTLED, Outcome.COMMIT, False, True, False)
        return SourceFacts(Mark.STREAMED, None, False, True, False, self.target)

    async def record(self, moving: Any, outcome: Outcome, reason: str, by: str) -> Any:
        self.said.append(outcome.value)


@pytest.mark.parametrize(
    ("target", "said"), [(CopyState.HELD, ["attach on c", "COMMIT"]), (CopyState.RUNNING, ["COMMIT"])]
)
async def test_communicators_are_built_before_commit_is_recorded(
    monkeypatch: pytest.MonkeyPatch, target: CopyState, said: list[str]
) -> None:
    monkeypatch.setattr(communicators, "down", lambda moving: True)
    marks: Any = SimpleNamespace(
        begin=SimpleNamespace(target_node="c", coordinator=""),
        record=SimpleNamespace(abandoned=False),
        mark=lambda *_, **__: None,
        last_mark=Mark.SETTLED,
    )
    ops, moving = Followed(target), SimpleNamespace(log=marks, waiting_for="")
    await ops.settle_once(moving)  # type: ignore[arg-type]
    assert ops.said == said


async def test_commit_is_not_recorded_before_the_communicators_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member cannot be reached: the target must not let the rank run without its communicators. One that has ended never
    comes back."""
    marked: dict[str, bool] = {}
    monkeypatch.setattr(communicators, "down", lambda moving: not marked)
    log: Any = SimpleNamespace(
        begin=SimpleNamespace(target_node="c", coordinator=""),
        record=SimpleNamespace(abandoned=False),
        mark=lambda *_, **fields: marked.update(fields),
        last_mark=Mark.SETTLED,
    )
    ops, moving = Followed(CopyState.HELD), SimpleNamespace(log=log, waiting_for="")
    ops.failure = Unreachable("node b could not be reached")
    with pytest.raises(Unreachable):
        await ops.settle_once(moving)  # type: ignore[arg-type]
    assert ops.said == ["attach on c"]
    ops.failure = RankGone("process 7 has ended")
    await ops.settle_once(moving)  # type: ignore[arg-type]
    assert ops.said == ["attach on c", "attach on c", "COMMIT"]
    assert marked == {"attached": True, "abandoned": True}
