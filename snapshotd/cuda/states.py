"""The CUDA states of a process and the driver's operations between them."""

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
    """A GPU that a process used and the GPU that replaces it, by UUID."""

    old_uuid: str
    new_uuid: str


@dataclass(frozen=True)
class Verb:
    """An operation of the driver on a process."""

    name: str  # the call of the helper
    needs: State  # the state in which the driver allows it
    done: tuple[State, ...]  # the states in which there is nothing left to do


LOCK = Verb("lock", State.RUNNING, (State.LOCKED, State.CHECKPOINTED))
CHECKPOINT = Verb("checkpoint", State.LOCKED, (State.CHECKPOINTED,))
RESTORE = Verb("restore", State.CHECKPOINTED, (State.LOCKED, State.RUNNING))
UNLOCK = Verb("unlock", State.LOCKED, (State.RUNNING,))
