"""Computes the exact bits of NCCL's reductions, with Python numbers.

Reductions are done in the order of ranks. Half-sized floats are summed as float32 and rounded once, at the end; float32
is rounded after every step, float64 is Python's float. Integers wrap around.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from tests.fakes.nccl_calls import Operator

Number = int | float


def as_float32(value: Number) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def as_float16(value: Number) -> float:
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def as_bfloat16(value: Number) -> float:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return float(struct.unpack("<f", struct.pack("<I", rounded << 16))[0])


def _identity(value: Number) -> Number:
    return value


@dataclass(frozen=True)
class DataType:
    name: str
    number: int
    format: str  # of struct; "" for bfloat16, which struct lacks
    step: Callable[[Number], Number]  # rounds an intermediate result
    store: Callable[[Number], Number]  # rounds the final result

    @property
    def width_bytes(self) -> int:
        return struct.calcsize(self.format) if self.format else 2

    @property
    def is_float(self) -> bool:
        return self.format in ("e", "f", "d", "")

    def pack(self, values: Sequence[Number]) -> bytes:
        if self.format:
            return struct.pack(f"<{len(values)}{self.format}", *values)
        return b"".join(struct.pack("<f", value)[2:] for value in values)

    def unpack(self, data: bytes) -> list[Number]:
        if self.format:
            return list(struct.unpack(f"<{len(data) // self.width_bytes}{self.format}", data))
        return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]

    def value(self, rank: int, index: int) -> Number:
        """Element `index` of rank `rank`'s buffer: many different numbers, none of them simple."""
        if not self.is_float:
            return self.store((rank * 7919 + index * 104729 + 12345) * 2654435761)
        return self.store(math.sin(rank * 1.7 + index * 0.61) * (1 + index % 5) * 0.4 + 0.5)


def _integer(bits: int, *, signed: bool) -> Callable[[Number], Number]:
    def wrap(value: Number) -> Number:
        wrapped = int(value) % (1 << bits)
        return wrapped - (1 << bits) if signed and wrapped >= 1 << (bits - 1) else wrapped

    return wrap


def _integer_type(name: str, number: int, format_: str, bits: int, *, signed: bool) -> DataType:
    # Bytes are summed as 32-bit numbers and wrapped at the end, which only matters for the average.
    step = _integer(max(bits, 32), signed=signed)
    return DataType(name, number, format_, step, _integer(bits, signed=signed))


TYPES = (
    _integer_type("int8", 0, "b", 8, signed=True),
    _integer_type("uint8", 1, "B", 8, signed=False),
    _integer_type("int32", 2, "i", 32, signed=True),
    _integer_type("uint32", 3, "I", 32, signed=False),
    _integer_type("int64", 4, "q", 64, signed=True),
    _integer_type("uint64", 5, "Q", 64, signed=False),
    DataType("float16", 6, "e", as_float32, as_float16),
    DataType("float32", 7, "f", as_float32, as_float32),
    DataType("float64", 8, "d", _identity, _identity),
    DataType("bfloat16", 9, "", as_float32, as_bfloat16),
)
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = TYPES


def _divided(datatype: DataType, total: Number, by: int) -> Number:
    if datatype.is_float:
        return datatype.step(total / by)
    return abs(int(total)) // by * (1 if total >= 0 else -1)  # C's division rounds towards zero


def reduced(datatype: DataType, operator: Operator, values: Sequence[Number]) -> Number:
    """The result for the ranks' values, which are in the order of ranks."""
    match operator:
        case Operator.PROD:
            total = reduce(lambda a, b: datatype.step(a * b), values)
        case Operator.MAX:
            total = max(values)
        case Operator.MIN:
            total = min(values)
        case _:
            total = reduce(lambda a, b: datatype.step(a + b), values)
    if operator is Operator.AVG:
        total = _divided(datatype, total, len(values))
    return datatype.store(total)


def scaled(datatype: DataType, factor: Number, value: Number) -> Number:
    return datatype.store(datatype.step(factor * value))
