"""A gRPC connection as snapshotd/api/channel.py offers it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from snapshotd.api.calls import CallEnded, CallFailed
from snapshotd.api.channel import GrpcChannel, GrpcStream, open_channel
from snapshotd.api.client import DaemonClient
from snapshotd.api.errors import BadConfig


async def test_channel_without_a_certificate_is_bad_config() -> None:
    with pytest.raises(BadConfig, match=r"connecting to node-2 at .* requires a certificate"):
        DaemonClient("10.0.0.2:7070", node="node-2")


@contextmanager
def served(path: Path, answer: Callable[[Any, Any], Any]) -> Iterator[GrpcChannel]:
    """A server whose only method is `answer`; not on this event loop, which the tests block."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, _details: object) -> Any:
            return grpc.stream_stream_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(f"unix:{path}/sock")
    server.start()
    try:
        yield GrpcChannel(open_channel(f"unix:{path}/sock", None))
    finally:
        server.stop(None)


@pytest.mark.parametrize("way", ["write", "done_writing"])
async def test_reason_of_a_peer_that_ends_the_call_before_it_has_read_it(tmp_path: Path, way: str) -> None:
    """Its status has arrived, but this event loop has not seen it yet, when the next message is written."""
    refused = threading.Event()

    def refuse(_requests: object, context: Any) -> None:
        refused.set()
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "only an operator may")

    with served(tmp_path, refuse) as channel:
        stream = await written_after(channel, refused, way)
        with pytest.raises(CallFailed, match="only an operator may") as got:
            await stream.read()
        assert got.value.status == "PERMISSION_DENIED"
        await channel.close()


@pytest.mark.parametrize("way", ["write", "done_writing"])
async def test_answer_of_a_peer_that_ends_the_call_before_it_has_read_it(tmp_path: Path, way: str) -> None:
    """The core keeps the status back until the answer has been read: a writer that waits for it would wait for ever."""
    answered = threading.Event()

    def answer(_requests: object, _context: Any) -> Iterator[bytes]:
        yield b"enough"
        answered.set()

    with served(tmp_path, answer) as channel:
        stream = await written_after(channel, answered, way)
        assert await stream.read() == b"enough"
        assert await stream.read() is None
        await channel.close()


async def written_after(channel: GrpcChannel, ended: threading.Event, way: str) -> GrpcStream:
    """A call that wrote, or ended its requests, after the peer had ended it."""
    stream = channel.stream("/snapshotd.v1.Source/Stream")
    await stream._call._metadata_sent.wait()
    assert ended.wait(20)
    time.sleep(0.2)  # while the status arrives in the threads of gRPC
    with contextlib.suppress(CallEnded):  # a busy machine may take longer
        await asyncio.wait_for(stream.write(b"") if way == "write" else stream.done_writing(), 20)
    return stream
