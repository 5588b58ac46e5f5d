"""Metrics in the Prometheus text format. The network process serves them over plain HTTP (snapshotd/api/metrics_http.py).

They are read on the event loop, so between two steps of the daemon and never during one. They contain numbers only, no names
of jobs, commands or users; nevertheless the address should be reachable by the monitoring only. One daemon is one process,
so the registry is a module variable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from snapshotd.proc.host import DAEMON_VERSION

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

REGISTRY = CollectorRegistry()
_MOVES = Counter("snapshotd_moves", "Moves that ended here, by outcome", ["outcome"], registry=REGISTRY)
_PHASE_SECONDS = Histogram(
    "snapshotd_phase_seconds", "Seconds a phase took", ["phase"], buckets=_SECONDS, registry=REGISTRY
)
_PHASE_BYTES = Counter("snapshotd_phase_bytes", "Bytes a phase moved", ["phase"], registry=REGISTRY)
_RANKS = Gauge("snapshotd_ranks", "Ranks whose process is on this node", registry=REGISTRY)
_IMAGE_BYTES = Gauge("snapshotd_image_held_bytes", "Bytes of images held in memory", registry=REGISTRY)
_CERTIFICATE = Gauge(
    "snapshotd_certificate_expiry_timestamp_seconds",
    "When this daemon's certificate expires, in seconds since 1970",
    registry=REGISTRY,
)
_ALARMS = Gauge(
    "snapshotd_health_alarms",
    "Alarms that are latched, by check and severity",
    ["check", "severity"],
    registry=REGISTRY,
)
_BUILD = Info("snapshotd", "This daemon", registry=REGISTRY)
_BUILD.info({"version": DAEMON_VERSION})
# A counter with labels is absent until it is first used, and then rate() has no result instead of zero.
for _outcome in ("COMMIT", "ABORT"):
    _MOVES.labels(outcome=_outcome)
ProcessCollector(registry=REGISTRY)


def move_ended(outcome: str) -> None:
    """`outcome` is "COMMIT" or "ABORT", as journalled."""
    _MOVES.labels(outcome=outcome).inc()


def phase(name: str, seconds: float, moved_bytes: int = 0) -> None:
    """Records that a phase of a move has ended."""
    _PHASE_SECONDS.labels(phase=name).observe(seconds)
    if moved_bytes:
        _PHASE_BYTES.labels(phase=name).inc(moved_bytes)


def alarms(counts: Mapping[tuple[str, str], int]) -> None:
    """How many alarms are latched, by check and severity."""
    _ALARMS.clear()
    for (check, severity), count in counts.items():
        _ALARMS.labels(check=check, severity=severity).set(count)


def certificate_expires(unix_s: float) -> None:
    _CERTIFICATE.set(unix_s)


def watch(*, ranks: Callable[[], float], image_bytes: Callable[[], float]) -> None:
    """Sets the functions that are called at each scrape. They run on the event loop and must return quickly."""
    _RANKS.set_function(ranks)
    _IMAGE_BYTES.set_function(image_bytes)


class Exposition:
    """The content type and the text, at most KEPT_S old: any host that can reach `metrics_listen` may ask, at any rate."""

    KEPT_S = 1.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._text, self._until_s = b"", 0.0

    def __call__(self) -> tuple[str, bytes]:
        """Called on the event loop, at each scrape."""
        if not self._text or self._clock() >= self._until_s:
            self._text = generate_latest(REGISTRY)
            self._until_s = self._clock() + self.KEPT_S
        return CONTENT_TYPE_LATEST, self._text


exposition = Exposition()
