"""The interface of a stream of chunks. There are two implementations: a gRPC call and a bulk connection."""

from __future__ import annotations

from typing import Protocol

from snapshotd.transport.image.frame import Answer, Frame


class Stream(Protocol):
    """One stream of chunks to the target, which returns answers or raises errors of the taxonomy.

    Every chunk is answered once, unless an ERROR or an exception ends the stream. The user must end it with `cancel`
    and `ended`, also after the last answer.
    """

    @property
    def strong(self) -> bool:
        """Whether chunks need a cryptographic digest, because other processes than the two daemons pass them on."""

    async def send(self, frame: Frame) -> bool:
        """Sends a chunk, which it prepares in a thread. False if the stream has ended: `receive` then raises the reason."""

    async def receive(self) -> Answer | None:
        """The next answer, None when the target has ended the stream normally."""

    async def done(self) -> None:
        """Announces that no more chunks follow; the target ends the stream when it has answered all of them."""

    def cancel(self) -> None:
        """Ends it at once; chunks in transit are lost."""

    async def ended(self) -> None:
        """Returns when no task, thread or descriptor of it is left. After `cancel`."""
