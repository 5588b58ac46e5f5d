"""The copies of snapshots that are on their way from this node to the buddies, and the limit that they share (`copy_limit`).

A percentage is one of the link that a connection uses: all copies over one interface share a bucket. Where the speed of a
link is not known, there is no limit. Images that are sent to resume a job never come here: a rollback is not limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from snapshotd.api.addresses import split_address
from snapshotd.config import Config
from snapshotd.net.link_speed import Link, normal
from snapshotd.transport.image.bulk_sender import BulkStream
from snapshotd.transport.image.limited_stream import LimitedStream
from snapshotd.transport.image.stream import Stream
from snapshotd.transport.pace import Bucket, Limit


@dataclass
class Copy:
    """One that is on its way."""

    lifted: asyncio.Event = field(default_factory=asyncio.Event)
    streams: list[LimitedStream] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        """For how long its streams waited for the limit, on average."""
        return sum(one.waited_s for one in self.streams) / max(len(self.streams), 1)


class Pacing:
    """All copies of this node. Used on one loop."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}  # by interface; of a limit in bytes: one, without a name
        self._copies: dict[str, list[Copy]] = {}  # by image, which may go to several buddies at once

    @contextmanager
    def copy(self, image: str) -> Iterator[Copy]:
        """As long as it is being sent."""
        copy = Copy()
        self._copies.setdefault(image, []).append(copy)
        try:
            yield copy
        finally:
            mine = self._copies[image] = [one for one in self._copies[image] if one is not copy]
            if not mine:
                del self._copies[image]

    def limited(
        self, copy: Copy, streams: Sequence[Stream], config: Config, links: Mapping[str, Link]
    ) -> Sequence[Stream]:
        """The streams of a copy, each with the limit of its link."""
        if not config.copy_limit:
            return streams
        limit, found = Limit.parse(config.copy_limit), list[Stream]()
        for stream in streams:
            # gRPC, which carries the images where no other port is open, is the network process's.
            own = stream.own_address if isinstance(stream, BulkStream) else split_address(config.advertise)[0]
            bucket = self._bucket(limit, links.get(normal(own)))
            found.append(stream if bucket is None else LimitedStream(stream, bucket, copy.lifted))
        copy.streams = [one for one in found if isinstance(one, LimitedStream)]
        return found

    def lift(self, image: str) -> bool:
        """Something waits for the copies of this image: they are sent without a limit from now on. False: none is on its
        way."""
        found = self._copies.get(image, [])
        for copy in found:
            copy.lifted.set()
        return bool(found)

    def _bucket(self, limit: Limit, link: Link | None) -> Bucket | None:
        """None: the speed of the link is not known. A link whose speed has changed gets a new one."""
        bytes_per_s = limit.of_link(link.bytes_per_s if link is not None else 0.0)
        if not bytes_per_s:
            return None
        name = link.interface if link is not None and limit.percent else ""
        if name not in self._buckets or self._buckets[name].bytes_per_s != bytes_per_s:
            self._buckets[name] = Bucket(bytes_per_s)
        return self._buckets[name]
