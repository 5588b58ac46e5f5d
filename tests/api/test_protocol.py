"""Programs with a common protocol number understand each other: what the number stands for is recorded beside this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from migrator.protocol import TABLE
from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check, Protocol


def record_of(number: int) -> Path:
    return Path(__file__).with_name(f"protocol-{number}.txt")


CHANGED = (
    "older programs would not understand this. Keep what they know, or increase NEWEST in snapshotd/api/protocol.py and"
    " record the new protocol: python -m tests.api.test_protocol"
)


def spoken() -> list[str]:
    """The steps of a move in their order, then every call and field, sorted."""
    calls = [
        f"call {service.name}.{method.name} {method.input_type.name} {method.output_type.name}"
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    fields = [line for message in pb.DESCRIPTOR.message_types_by_name.values() for line in fields_of(message)]
    steps = [f"step {step.action} {' '.join(step.calls)}" for step in TABLE]
    return [*steps, *sorted(calls), *sorted(fields)]


def fields_of(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        named = kind.full_name if kind is not None else type_name(field)
        yield f"field {message.full_name}.{field.name} {field.number} {'repeated ' if field.is_repeated else ''}{named}"
    for nested in message.nested_types:
        yield from fields_of(nested)


def type_name(field: FieldDescriptor) -> str:
    return next(
        name.removeprefix("TYPE_").lower()
        for name, value in vars(FieldDescriptor).items()
        if name.startswith("TYPE_") and value == field.type
    )


@pytest.mark.parametrize("number", range(protocol.OLDEST, protocol.NEWEST + 1))
def test_what_is_recorded_for_the_number_still_holds(number: int) -> None:
    recorded, now = record_of(number).read_text().splitlines(), spoken()
    assert sorted(set(recorded) - set(now)) == [], CHANGED
    steps = [line for line in now if line.startswith("step ")]
    assert steps == [line for line in recorded if line.startswith("step ")], CHANGED


def numbers(oldest: int, newest: int) -> Protocol:
    return Protocol(newest=newest, oldest=oldest)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (numbers(2, 2), numbers(2, 2), 2),
        (numbers(2, 4), numbers(3, 6), 4),
        (numbers(2, 2), numbers(3, 4), None),
        (numbers(2, 2), Protocol(), None),
        (Protocol(), Protocol(), None),
    ],
)
def test_the_newest_common_number_is_spoken(one: Protocol, other: Protocol, common: int | None) -> None:
    assert protocol.common(one, other) == protocol.common(other, one) == common
    found = protocol.check("one", one, "other", other)
    assert (found.verdict == Check.PASS) == (common is not None)
    assert (found.remedy == "") == (common is not None)


if __name__ == "__main__":
    record_of(protocol.NEWEST).write_text("".join(f"{line}\n" for line in spoken()))
