"""The methods of proto/snapshotd.proto by path, with the classes of their messages. Push is beside them: plain bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from snapshotd.api import snapshotd_pb2
from snapshotd.api.decoding import decoded
from snapshotd.api.errors import Damaged

#: The image channel over gRPC (transport/image/grpc_channel.py), which is not in the .proto.
PUSH = "/snapshotd.v1.Target/Push"


@dataclass(frozen=True)
class Method:
    path: str
    request: type[Message]
    reply: type[Message]
    request_streaming: bool
    reply_streaming: bool

    def decode_request(self, blob: bytes) -> Message:
        try:
            return decoded(self.request, blob)
        except DecodeError as error:
            raise Damaged(f"a request for {self.path} is malformed: {error}") from error


@functools.cache
def methods() -> dict[str, Method]:
    return {
        f"/{service.full_name}/{found.name}": Method(
            f"/{service.full_name}/{found.name}",
            GetMessageClass(found.input_type),
            GetMessageClass(found.output_type),
            found.client_streaming,
            found.server_streaming,
        )
        for service in snapshotd_pb2.DESCRIPTOR.services_by_name.values()
        for found in service.methods
    }


def rewritten(kind: type[Message], blob: bytes) -> bytes:
    """The same message, written by this process, without fields that it does not know. Raises DecodeError."""
    message = decoded(kind, blob)
    message.DiscardUnknownFields()
    return message.SerializeToString()
