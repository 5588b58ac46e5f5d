"""Every kept input, and mutations of them, through every parser of foreign bytes."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import SEEDS, TARGETS, seeds

_MUTATIONS = 1500
_MAX_BYTES = 1 << 16
_SIGNS = [b"\n", b"\0", b"\xff", b"\r", b"\f", b"{", b"[", b'"', b"Infinity", b"1e999", b"-1", b"null"]
_TOKENS = [*_SIGNS, b"[" * 5000, b"0" * 5000]


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_raise_declared_errors_only(name: str) -> None:
    assert seeds(name)
    for data in [b"", b"\0" * 64, b"\xff" * 64, *seeds(name)]:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_raise_declared_errors_only(name: str, pytestconfig: pytest.Config) -> None:
    chance = random.Random(f"{name} {pytestconfig.getoption('seed')}")
    known = [*seeds(name), b""]
    for _ in range(_MUTATIONS):
        data = _mutated(chance, known)
        try:
            TARGETS[name](data)
        except BaseException as error:
            error.add_note(f"input: {data[:2000]!r}")
            raise


def _mutated(chance: random.Random, known: list[bytes]) -> bytes:
    data = bytearray(chance.choice(known))
    for _ in range(chance.randint(1, 6)):
        at, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        match chance.randrange(6):
            case 0:
                data[at : at + 1] = chance.randbytes(1)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = chance.choice(_TOKENS)
            case 3:
                data[at:end] = data[at:end] * 2
            case 4:
                other = chance.choice(known)
                data[at:end] = other[chance.randint(0, len(other)) :]
            case _:
                data[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
    return bytes(data[:_MAX_BYTES])


def test_every_target_has_kept_inputs() -> None:
    assert {path.name for path in SEEDS.iterdir()} == set(TARGETS)
