"""The driver's words for a process: its states, the verbs between them, and when a verb has nothing left to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


@dataclass(frozen=True)
class Pair:
    """A GPU a process was on and the GPU that takes its place, by UUID."""

    old_uuid: str
    new_uuid: str


@dataclass(frozen=True)
class Verb:
    name: str  # as the helper knows it
    needs: State  # where the driver allows it
    done: tuple[State, ...]  # where there is nothing left to do


LOCK = Verb("lock", State.RUNNING, (State.LOCKED, State.CHECKPOINTED))
CHECKPOINT = Verb("checkpoint", State.LOCKED, (State.CHECKPOINTED,))
RESTORE = Verb("restore", State.CHECKPOINTED, (State.LOCKED, State.RUNNING))
UNLOCK = Verb("unlock", State.LOCKED, (State.RUNNING,))
