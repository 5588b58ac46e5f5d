"""A gRPC connection as snapshotd/api/channel.py offers it."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from snapshotd.api.calls import CallEnded, CallFailed
from snapshotd.api.channel import GrpcChannel, open_channel
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import BadConfig


async def test_channel_without_a_certificate_is_bad_config() -> None:
    with pytest.raises(BadConfig, match=r"connecting to node-2 at .* requires a certificate"):
        DaemonClient("10.0.0.2:7070", node="node-2")


async def test_reason_of_a_peer_that_ends_the_call_before_it_has_read_it(tmp_path: Path) -> None:
    """Its status has arrived, but this event loop has not seen it yet, when the next message is written."""

    refused = threading.Event()

    def refuse(_requests: object, context: Any) -> None:
        refused.set()
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "only an operator may")

    class Refuses(grpc.GenericRpcHandler):
        def service(self, _details: object) -> Any:
            return grpc.stream_stream_rpc_method_handler(refuse)

    server = grpc.server(ThreadPoolExecutor(1))  # not on this event loop, which is blocked below
    server.add_generic_rpc_handlers((Refuses(),))
    server.add_insecure_port(f"unix:{tmp_path}/sock")
    server.start()
    channel = GrpcChannel(open_channel(f"unix:{tmp_path}/sock", None))
    try:
        for way in ("write", "done_writing"):
            stream = channel.stream("/snapshotd.v1.Source/Stream")
            await stream._call._metadata_sent.wait()
            refused.wait(20)
            time.sleep(0.2)  # while the status arrives in the threads of gRPC
            with contextlib.suppress(CallEnded):  # a busy machine may take longer
                await (stream.write(b"") if way == "write" else stream.done_writing())
            with pytest.raises(CallFailed, match="only an operator may") as got:
                await stream.read()
            assert got.value.status == "PERMISSION_DENIED"
            refused.clear()
    finally:
        await channel.close()
        server.stop(None)
