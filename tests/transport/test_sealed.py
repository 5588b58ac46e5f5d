"""Encrypted connections, which both data channels use: every alteration of what is sent is noticed."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from snapshotd.transport.keys import Keys
from snapshotd.transport.sealed import SealedConnection, Unauthentic


def sealed_by(key: bytes, messages: Sequence[bytes]) -> list[bytes]:
    """Each message as it is sent, encrypted."""
    ours, theirs = socket.socketpair()
    with SealedConnection(ours, Keys(key, key)) as sender, theirs:
        travelled = []
        for message in messages:
            sender.send(message)
            travelled.append(theirs.recv(1 << 16))
    return travelled


def opened_by(key: bytes, stream: bytes, lengths: Sequence[int]) -> tuple[list[bytes], bool]:
    """(the messages that a reader expecting these lengths accepts, whether it then raises an error)."""
    ours, theirs = socket.socketpair()
    read = []
    with SealedConnection(ours, Keys(key, key)) as reader:
        with theirs:
            theirs.sendall(stream)
        try:
            for length in lengths:
                blob = bytearray(length)
                reader.read_into(memoryview(blob))
                read.append(bytes(blob))
        except (Unauthentic, ConnectionResetError):
            return read, True
    return read, False


MESSAGES = st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=6)


@given(MESSAGES, st.data())
def test_every_alteration_is_detected(messages: list[bytes], draw: st.DataObject) -> None:
    key = secrets.token_bytes(32)
    lengths = [len(message) for message in messages]
    travelled = sealed_by(key, messages)
    assert opened_by(key, b"".join(travelled), lengths) == (messages, False)
    assert not any(message in sealed for message, sealed in zip(messages, travelled, strict=True) if len(message) > 8)

    number = draw.draw(st.integers(0, len(messages) - 1), "message")
    at = draw.draw(st.integers(0, len(travelled[number]) - 1), "byte")
    bit = draw.draw(st.integers(0, 7), "bit")
    other = draw.draw(st.integers(0, len(messages) - 1), "other message")
    changed = bytearray(travelled[number])
    changed[at] ^= 1 << bit
    before, behind = travelled[:number], travelled[number + 1 :]
    swapped = list(travelled)
    swapped[number], swapped[other] = swapped[other], swapped[number]
    ways = {
        "changed": [*before, bytes(changed), *behind],
        "cut": [*before, travelled[number][:at]],
        "left out": [*before, *behind],
        "repeated": [*before, travelled[number], travelled[number], *behind],
        "swapped": swapped,
        "of another connection": [*before, sealed_by(secrets.token_bytes(32), messages)[number], *behind],
    }
    for way, stream in ways.items():
        if way == "swapped" and other == number:
            continue
        # One message more than was sent is read: what follows the last one must not pass either.
        read, raised = opened_by(key, b"".join(stream), [*lengths, lengths[number]])
        assert raised, way
        untouched = min(number, other) if way == "swapped" else number + (way == "repeated")
        assert read == messages[:untouched], way


def test_message_that_comes_back_is_rejected() -> None:
    """Each direction has its own key."""
    sends, reads = secrets.token_bytes(32), secrets.token_bytes(32)
    (travelled,) = sealed_by(sends, [b"hello"])
    assert opened_by(sends, travelled, [5]) == ([b"hello"], False)
    assert opened_by(reads, travelled, [5]) == ([], True)


def test_messages_of_any_length_share_one_buffer() -> None:
    ours, theirs = socket.socketpair()
    one, other = (secrets.token_bytes(32) for _ in range(2))
    with SealedConnection(ours, Keys(one, other)) as sender, SealedConnection(theirs, Keys(other, one)) as reader:
        for messages in ([b"a" * 5, b""], [b"b" * 5000], [b"c", b"d" * 7, b"e" * 10_000], [b"f"]):
            sender.send(*messages)
            assert [reader.read(len(message)) for message in messages] == messages
        reader.send(b"back")
        assert sender.read(4) == b"back"
