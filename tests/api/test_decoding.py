"""Numbers that are infinite or not a number make a message malformed, wherever they are in it."""

from __future__ import annotations

import math

import pytest
from google.protobuf.message import DecodeError, Message

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.decoding import decoded
from snapshotd.api.errors import Damaged
from snapshotd.api.methods import methods, rewritten


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["field", "message", "repeated"])
def test_such_a_number_is_refused(number: float, place: str) -> None:
    message: Message = {
        "field": pb.GetHealthRequest(wait_s=number),
        "message": pb.ListMovesReply(moves=[pb.MoveRecord(move="m-1", begun_unix_s=number)]),
        "repeated": pb.Health(alarms=[pb.Alarm(), pb.Alarm(since_unix_s=number)]),
    }[place]
    blob = message.SerializeToString()
    with pytest.raises(DecodeError, match="_s is not a finite number"):
        decoded(type(message), blob)
    with pytest.raises(DecodeError):
        rewritten(type(message), blob)


def test_the_daemon_does_not_rely_on_its_network_process_for_that() -> None:
    with pytest.raises(Damaged, match="wait_s is not a finite number"):
        methods()["/snapshotd.v1.Node/GetHealth"].decode_request(
            pb.GetHealthRequest(wait_s=math.nan).SerializeToString()
        )


def test_other_messages_are_what_they_were() -> None:
    health = pb.Health(node="node-1", alarms=[pb.Alarm(check="gpu-ecc", since_unix_s=1.5, count=2)])
    assert decoded(pb.Health, health.SerializeToString()) == health
    assert decoded(pb.RankFacts, pb.RankFacts(limits={"a": "b"}).SerializeToString()).limits == {"a": "b"}


def test_every_kind_of_message_can_be_examined() -> None:
    for method in methods().values():
        assert decoded(method.request, b"") == method.request()
        assert decoded(method.reply, b"") == method.reply()
