"""Takes signals from outside over HTTP, beside the page: POST /alertmanager and POST /signal.

Invariants: nothing of a request is read before its token was found valid. Tokens of senders are not those of operators: they
report, and can neither act nor clear what a node itself has reported. A sender that reports without end is refused for a
while, because the event log is never shortened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from migrator import formatting
from migrator.autopilot import outside, policy
from migrator.autopilot.outside import Names, Notification, Reported, Signal
from migrator.autopilot.page.access import Tokens, from_elsewhere
from migrator.autopilot.page.answers import error
from migrator.autopilot.store import Store
from migrator.autopilot.watcher import Allowance
from snapshotd.api.errors import SnapshotError
from snapshotd.runtime.logs import Throttle

log = logging.getLogger(__name__)

T = TypeVar("T", Notification, Signal)
BODY_BYTES = 1 << 20
#: How long a request may take to arrive.
BODY_S = 30.0
#: Log records in a minute about one sender, and about all requests without a valid token.
MAX_COMPLAINTS = 10
#: Names of unknown nodes in one answer.
SHOWN = 5


class Webhook:
    """The handlers. `counted` gets the outcome of each signal, and how many."""

    def __init__(
        self,
        store: Store,
        tokens: Tokens,
        names: Names,
        rules: policy.Webhook,
        counted: Callable[[str, int], None] = lambda outcome, count: None,
    ) -> None:
        self.store, self.tokens, self.names, self.rules, self._counted = store, tokens, names, rules, counted
        self._complaints = Throttle(log, MAX_COMPLAINTS, "%s")
        self._allowances = {name: Allowance() for name in tokens.names.values()}
        self._floods: set[str] = set()  # senders that have used up what they may have recorded

    def routes(self) -> list[Route]:
        return [
            Route("/alertmanager", self.alertmanager, methods=["POST"]),
            Route("/signal", self.signal, methods=["POST"]),
        ]

    async def alertmanager(self, request: Request) -> Response:
        """Answers 200 also if nodes are unknown: Alertmanager would send the whole group again, to no avail."""
        read = await self._read(request, Notification)
        if isinstance(read, Response):
            return read
        sender, found = read
        reported: list[Reported] = []
        unknown: Counter[str] = Counter()
        for alert in found.alerts:
            one = outside.of_alert(alert, self.names, self.rules)
            if one is None:
                unknown[outside.named_node(alert, self.rules) or "(no label names one)"] += 1
            else:
                reported.append(one)
        if unknown:
            self._counted("unknown_node", unknown.total())
            text = "%s reported %d alerts about nodes that the cluster does not have: %s"
            self._complaints.warning(f"sender {sender}", text, sender, unknown.total(), ", ".join([*unknown][:SHOWN]))
        outcomes = await self._take(sender, reported)
        if isinstance(outcomes, Response):
            return outcomes
        return JSONResponse({**outcomes, "unknown_node": unknown.total(), "unknown_nodes": [*unknown][:SHOWN]})

    async def signal(self, request: Request) -> Response:
        read = await self._read(request, Signal)
        if isinstance(read, Response):
            return read
        sender, found = read
        reported = outside.of_signal(found, self.names)
        if reported is None:
            self._counted("unknown_node", 1)
            text = "%s reported a signal about %s, which the cluster does not have"
            self._complaints.warning(f"sender {sender}", text, sender, formatting.plain(found.node)[:100])
            return error(404, "the cluster has no such node", "use a name or an address of cluster.toml")
        outcomes = await self._take(sender, [reported])
        if isinstance(outcomes, Response):
            return outcomes
        if outcomes["refused"]:
            return error(409, f"{reported.node} has {outside.MAX_ALARMS} alarms from outside already", "clear some")
        return JSONResponse({"node": reported.node, "check": reported.check, **outcomes})

    async def _take(self, sender: str, reported: list[Reported]) -> Counter[str] | Response:
        try:
            outcomes = await self.store.take_signals(reported, f"{sender} (webhook)", self._allowances[sender].take)
            if outcomes is None:
                await self._note_flood(sender)
        except SnapshotError as problem:  # a state that several autopilots share may be out of reach
            return self._refused(sender, 503, problem.message, "send it again later")
        if outcomes is None:
            self._counted("refused", len(reported))
            answer = error(429, "you report more than can be recorded", "send only alerts about nodes of this cluster")
            answer.headers["Retry-After"] = "600"
            return answer
        if outcomes["raised"] or outcomes["cleared"]:
            self._floods.discard(sender)
        for outcome, count in outcomes.items():
            self._counted(outcome, count)
        return outcomes

    async def _note_flood(self, sender: str) -> None:
        if sender in self._floods:
            return
        self._floods.add(sender)
        text = f"the sender {sender} reports more than can be recorded: its signals are refused for a while"
        try:
            await self.store.note("flood", text)
        except SnapshotError:
            self._floods.discard(sender)
            raise

    async def _read(self, request: Request, kind: type[T]) -> tuple[str, T] | Response:
        """The sender and the body, or why they are refused."""
        if from_elsewhere(request.headers, request.url.scheme):
            return error(403, "the request was made by a page of another origin")
        sender = self.tokens.operator(request.headers.get("authorization", ""))
        if not sender:
            self._counted("unauthorised", 1)
            address = request.client.host if request.client is not None else "an unknown address"
            text = "the webhook refused a request without a valid token from %s"
            self._complaints.warning("the webhook", text, formatting.plain(address))
            return error(401, "this needs the token of a sender", "use one of --webhook-token-file of the autopilot")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > BODY_BYTES:
                        return self._refused(sender, 413, f"it has more than {BODY_BYTES} bytes", "set max_alerts")
        except TimeoutError:
            return self._refused(sender, 408, f"it did not arrive within {BODY_S:g} s")
        try:
            return sender, msgspec.json.decode(body, type=kind)
        except (ValueError, RecursionError) as problem:  # msgspec's DecodeError is a ValueError, as that of UTF-8 is
            return self._refused(sender, 400, f"it cannot be read: {formatting.plain(str(problem))[:200]}")

    def _refused(self, sender: str, status: int, reason: str, remedy: str = "") -> Response:
        self._counted("refused", 1)
        self._complaints.warning(f"sender {sender}", "a request of %s was refused: %s", sender, reason)
        return error(status, reason, remedy)
