"""What a sender needs of a transport: streams that take chunks and give answers. There are two: gRPC and plain TLS."""

from __future__ import annotations

from typing import Protocol

from snapshotd.transport.image.frame import Answer, Frame


class Stream(Protocol):
    """One stream of chunks to the target. Out of it come answers, or errors of the taxonomy.

    Every chunk sent is answered once, unless an ERROR or an exception ends the stream. Who uses it ends it: `cancel`
    and `ended`, also after the last answer.
    """

    async def send(self, frame: Frame) -> bool:
        """Hands a chunk over. False where the stream is already over: `receive` then says why."""

    async def receive(self) -> Answer | None:
        """The next answer, None when the target has ended the stream in good order."""

    async def done(self) -> None:
        """No more chunks; the target ends the stream when it has answered all of them."""

    def cancel(self) -> None:
        """Ends it as it is; what is on its way is lost."""

    async def ended(self) -> None:
        """Returns when nothing of it is left here: no task, no thread, no descriptor. After `cancel`."""
