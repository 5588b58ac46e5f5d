"""Sends malformed requests to a daemon: `python -m integration.wirefuzz CLUSTER NODE IDENTITY EXAMPLES SEED`.

Every method of a running daemon gets EXAMPLES times random bytes or random messages, with names that are paths and numbers
that are too large, and one gets a message of absurd size. The daemon must answer each with a valid reply or an error of the
taxonomy other than `internal`. Prints all other answers, and the number of answers of each kind. Run it where the nodes are
reachable.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from integration.harness import INVENTED_MOVE
from migrator.cluster import Cluster
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.channel import open_channel
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import WIRE_KEY

#: Not in the descriptor, because its frames are not protobuf messages. It only gets random bytes.
PUSH = "/snapshotd.v1.Target/Push"
ABSURD_BYTES = 48 << 20
CALL_S = 20.0

texts = st.one_of(
    st.sampled_from(["", INVENTED_MOVE, "../../etc/passwd", "m-../..", "\0", "x" * 5000, "node-1", "10.0.0.1:1"]),
    st.text(max_size=30),
)
#: Valid values for half of the draws, so that the checks of other fields are reached too.
_SOUND = {"move": INVENTED_MOVE, "rank_uid": "job-0-01234567", "uid": "job-0-01234567"}
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 7),
}


def values(field: Any) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(field.message_type)
    if field.name in _SOUND:
        return st.one_of(st.just(_SOUND[field.name]), texts)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.binary(max_size=40) if field.type == FieldDescriptor.TYPE_BYTES else texts
    return _NUMBERS[field.cpp_type]


@st.composite
def messages(draw: Any, descriptor: Any) -> Message:
    """Messages of this type in which some fields are set, to any value."""
    made: Message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.is_repeated:
            values_drawn = draw(st.lists(values(field), max_size=3))
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                getattr(made, field.name).update({entry.key: entry.value for entry in values_drawn})
            elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                for value in values_drawn:
                    getattr(made, field.name).add().CopyFrom(value)
            else:
                getattr(made, field.name).extend(values_drawn)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            getattr(made, field.name).CopyFrom(draw(values(field)))
        else:
            setattr(made, field.name, draw(values(field)))
    return made


class Fuzz:
    def __init__(self, endpoint: str, node: str, identity: Path) -> None:
        credentials = Credentials(identity / "ca.crt", identity / "tls.crt", identity / "tls.key")
        self._runner = asyncio.Runner()
        limits = [("grpc.max_send_message_length", -1)]
        self._channel = self._runner.run(self._open(endpoint, credentials, node, limits))
        self.heard: Counter[str] = Counter()  # by the error's code, "" for a reply
        self.wrong: list[str] = []

    async def _open(self, *how: Any) -> grpc.aio.Channel:
        return open_channel(*how)

    def close(self) -> None:
        self._runner.run(self._channel.close())
        self._runner.close()

    def send(self, path: str, pieces: list[bytes]) -> None:
        """Makes one call, as a stream in both directions: all kinds of calls look like that on the wire."""
        error = self._runner.run(self._call(path, pieces))
        if error is None:
            self.heard[""] += 1
            return
        wire = dict(error.trailing_metadata() or ()).get(WIRE_KEY)
        result = json.loads(wire) if wire else {}
        self.heard[result["code"] if wire else str(error.code())] += 1
        sent = [piece[:200] for piece in pieces]
        if wire and result["code"] == "internal":
            self.wrong.append(f"{path} {sent}: {result['message']}")
        elif not wire and error.code() not in _FROM_GRPC:
            self.wrong.append(f"{path} {sent}: {error.code()} {error.details()}")

    async def _call(self, path: str, pieces: list[bytes]) -> grpc.aio.AioRpcError | None:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(path)
        call = method(iter(pieces), timeout=CALL_S)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error
        return None


#: Statuses that gRPC itself returns: a request that is no message, too many, none, or too large, or a cancelled stream.
_FROM_GRPC = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
}


def fuzz_method(fuzz: Fuzz, path: str, method: MethodDescriptor | None, examples: int, drawn: int) -> None:
    @seed(drawn)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def go(data: st.DataObject) -> None:
        garbage = st.binary(max_size=300)
        one = messages(method.input_type).map(lambda made: made.SerializeToString()) if method else garbage
        fuzz.send(path, data.draw(st.lists(st.one_of(one, one, garbage), min_size=1, max_size=2)))

    go()


def main() -> int:
    cluster = Cluster.load(sys.argv[1])
    node, identity, examples, drawn = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    fuzz = Fuzz(cluster.nodes[node], node, identity)
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            fuzz_method(fuzz, f"/{service.full_name}/{method.name}", method, examples, drawn)
    fuzz_method(fuzz, PUSH, None, examples, drawn)
    fuzz.send("/snapshotd.v1.Node/ListRanks", [b"\0" * ABSURD_BYTES])
    fuzz.close()
    print(json.dumps({"heard": fuzz.heard, "wrong": fuzz.wrong}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
