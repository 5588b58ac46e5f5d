"""The chain of digests over the event log: a changed, removed or inserted record is noticed.

Invariant: the digest of a record covers its number, its content and the digest before it. A log that was cut off at its end
is a valid, shorter chain: keep a digest elsewhere (`migrator report verify` prints the last one) to notice that too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

START = "0" * 64


@dataclass(frozen=True)
class Record:
    """One event of the log."""

    id: int
    unix_s: float
    kind: str
    node: str
    text: str
    data: dict[str, Any]
    previous: str
    digest: str

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "unix_s": self.unix_s,
            "kind": self.kind,
            "node": self.node,
            "text": self.text,
            "data": self.data,
            "digest": self.digest,
        }

    def content(self) -> bytes:
        """What the digest is made of: one line of JSON."""
        values = [self.id, self.unix_s, self.kind, self.node, self.text, self.data, self.previous]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def record(number: int, unix_s: float, kind: str, node: str, text: str, data: dict[str, Any], previous: str) -> Record:
    made = Record(number, unix_s, kind, node, text, data, previous, "")
    return replace(made, digest=hashlib.sha256(made.content()).hexdigest())


def problems(records: Iterable[Record], known: str = "") -> list[str]:
    """What is wrong with a log, in the order of its records. `known` is a digest that it must contain."""
    found: list[str] = []
    previous, number, seen = START, 0, not known
    begun: set[str] = set()
    ended: set[str] = set()
    for one in records:
        if one.id != number + 1:
            found.append(f"record {number + 1} is missing: record {one.id} follows record {number}")
        if one.previous != previous:
            found.append(f"record {one.id} does not follow the record before it")
        made = record(one.id, one.unix_s, one.kind, one.node, one.text, one.data, one.previous)
        if made.digest != one.digest:
            found.append(f"record {one.id} was changed after it was written")
        found += _about_moves(one, begun, ended)
        previous, number, seen = one.digest, one.id, seen or one.digest == known
    if not seen:
        found.append(f"no record has the digest {known}: records were removed or replaced")
    return found


def _about_moves(one: Record, begun: set[str], ended: set[str]) -> list[str]:
    """Every move has one intent with a reason, and at most one result after it."""
    move = str(one.data.get("id", ""))
    if one.kind == "intent":
        twice = [f"record {one.id}: move {move} was intended twice"] if move in begun else []
        begun.add(move)
        return twice + ([] if one.data.get("reason") else [f"record {one.id}: move {move} has no reason"])
    if one.kind == "result":
        if move not in begun:
            return [f"record {one.id}: move {move} ended without having been intended"]
        if move in ended:
            return [f"record {one.id}: move {move} ended twice"]
        ended.add(move)
    return []
