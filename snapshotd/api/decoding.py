"""Decodes messages of calls. A number that is infinite or not a number makes a message malformed: no caller means one, timers
lose their order by one, JSON has none, and no comparison with a limit holds for one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

Kind = TypeVar("Kind", bound=Message)

_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def decoded(kind: type[Kind], blob: bytes) -> Kind:
    """The message in `blob`. Raises DecodeError."""
    message = kind.FromString(blob)
    _must_be_finite(message)
    return message


def _must_be_finite(message: Message) -> None:
    for name, is_message, is_repeated in _suspect(message.DESCRIPTOR):
        value = getattr(message, name)
        if is_message and not is_repeated and not message.HasField(name):
            continue
        for each in value if is_repeated else (value,):
            if is_message:
                _must_be_finite(each)
            elif not math.isfinite(each):
                raise DecodeError(f"{name} is not a finite number")


@functools.cache
def _suspect(kind: Descriptor) -> list[tuple[str, bool, bool]]:
    """The fields that are or contain such numbers: name, whether it is a message, whether it is repeated."""
    return [
        (field.name, field.message_type is not None, field.is_repeated)
        for field in kind.fields
        if field.cpp_type in _FLOATS or (field.message_type is not None and _contains(field.message_type, ()))
    ]


def _contains(kind: Descriptor, above: Iterable[Descriptor]) -> bool:
    around = {*above, kind}
    return any(
        field.cpp_type in _FLOATS
        or (
            field.message_type is not None
            and field.message_type not in around
            and _contains(field.message_type, around)
        )
        for field in kind.fields
    )
