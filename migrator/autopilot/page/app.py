"""The page over HTTP: files, the state, the timeline, a stream of news, and actions.

Invariants: only POST changes anything, with a token and not from another origin (access.py). Every action is recorded before
it is carried out, with the operator's name and address. No answer loads anything from another host.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from migrator import formatting
from migrator.autopilot.page import actions, view
from migrator.autopilot.page.access import Certificates, Tokens, from_elsewhere
from migrator.autopilot.page.answers import error
from migrator.autopilot.page.feed import Feed
from snapshotd.api.errors import NotFound, SnapshotError, Usage
from snapshotd.runtime.logs import Throttle

log = logging.getLogger(__name__)

PAGE = 100  # records of one page of the timeline
BODY_BYTES = 8192
#: Of a job and what is looked for in it.
NAME_CHARACTERS = 1000
#: Where serving.py puts the certificate of a connection (PEM), in the state of its requests.
CERTIFICATE = "certificate"
#: Log records in a minute about requests without a valid token, which anybody can make.
MAX_COMPLAINTS = 10
LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")
SCRIPTS = ("page.js", "acting.js", "charts.js", "dom.js", "job.js", "map.js", "panels.js", "report.js", "timeline.js")
FILES = {
    "/": ("index.html", "text/html"),
    **{f"/{name}": (name, "text/javascript") for name in SCRIPTS},
    **{f"/{name}": (name, "text/css") for name in ("page.css", "parts.css", "job.css")},
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class App:
    """The handlers. `nodes` are the nodes of the cluster: an action about another one is refused. `certificates`: those
    that are accepted instead of a token; None: there are none."""

    def __init__(
        self, feed: Feed, tokens: Tokens, nodes: Collection[str], certificates: Certificates | None = None
    ) -> None:
        self.feed, self.store, self.tokens, self.nodes = feed, feed.store, tokens, nodes
        self.certificates = certificates
        self._complaints = Throttle(log, MAX_COMPLAINTS, "%s")

    def asgi(self, *, local: bool = False, more: Sequence[Route] = ()) -> Starlette:
        """`local`: it is served on loopback without TLS, and only names of this machine are accepted."""
        folder = resources.files("migrator.autopilot.page") / "static"
        routes = [
            Route(path, _file((folder / name).read_bytes(), kind), methods=["GET"])
            for path, (name, kind) in FILES.items()
        ]
        routes += [
            Route("/api/state", self.state, methods=["GET"]),
            Route("/api/job", self.job, methods=["GET"]),
            Route("/api/timeline", self.timeline, methods=["GET"]),
            Route("/api/news", self.news, methods=["GET"]),
            Route("/api/certificate", self.certificate, methods=["GET"]),
            Route("/api/operator", self.operator, methods=["POST"]),
            Route("/api/actions", self.act, methods=["POST"]),
            *more,
        ]
        return Starlette(
            routes=routes, middleware=[Middleware(_Headers, local=local), Middleware(GZipMiddleware, compresslevel=5)]
        )

    async def state(self, request: Request) -> Response:
        await self.feed.look()
        headers = {"ETag": self.feed.etag}
        if request.headers.get("if-none-match", "").removeprefix("W/") == self.feed.etag:
            return Response(status_code=304, headers=headers)
        headers["Vary"] = "Accept-Encoding"
        body = self.feed.body
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["Content-Encoding"] = await self.feed.compressed(), "gzip"
        return Response(body, media_type="application/json", headers=headers)

    async def timeline(self, request: Request) -> Response:
        """One page of records, the newest first: those before a number, or the newest."""
        last = await self.store.last_event()
        before = _number(request.query_params.get("before")) or last + 1
        before = min(before, last + 1)
        first = max(before - 1 - PAGE, 0)
        records = await self.store.events(first, before - 1 - first)
        lines = [view.line(record) for record in reversed(records)]
        return JSONResponse({"records": lines, "more": first > 0, "last": last})

    async def job(self, request: Request) -> Response:
        """One job, by its key "USER/NAME"."""
        key, find = request.query_params.get("job", ""), request.query_params.get("find", "").strip()
        if "/" not in key or len(key) + len(find) > NAME_CHARACTERS:
            return error(400, 'name a job as "USER/NAME"')
        return Response(await self.feed.job(key, find), media_type="application/json")

    async def news(self, request: Request) -> Response:
        """The browser names the last event that it has seen when it connects again."""
        after = _number(request.headers.get("last-event-id")) or _number(request.query_params.get("after"))
        return StreamingResponse(
            self.feed.stream(after or 0), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    async def certificate(self, request: Request) -> Response:
        """Says whose certificate the browser has shown, so that the page can offer it for the login. It is not a login."""
        return JSONResponse({"operator": self._shown(request)})

    async def operator(self, request: Request) -> Response:
        """Says whose token it is, so that a wrong one is noticed before it is needed."""
        name, refusal = self._may_act(request)
        return refusal or JSONResponse({"operator": name})

    async def act(self, request: Request) -> Response:
        name, refusal = self._may_act(request)
        if refusal is not None:
            return refusal
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return error(415, "the body must be application/json")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES:
                return error(413, "the request is too large")
        try:
            asked = msgspec.json.decode(body, type=actions.Asked)
            actions.check(asked, self.nodes)
            address = request.client.host if request.client is not None else "an unknown address"
            return JSONResponse({"done": await actions.perform(self.feed, asked, name, address)})
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            return error(400, f"the request cannot be read: {problem}")
        except SnapshotError as problem:
            status = {Usage: 400, NotFound: 404}.get(type(problem), 409)
            return error(status, problem.message, problem.advice)

    def _may_act(self, request: Request) -> tuple[str, Response | None]:
        if from_elsewhere(request.headers, request.url.scheme):
            return "", error(403, "the request was made by a page of another origin")
        authorization = request.headers.get("authorization", "")
        by_certificate = authorization.strip().lower() == "certificate"
        name = self._shown(request) if by_certificate else self.tokens.operator(authorization)
        if not name:
            address = request.client.host if request.client is not None else "an unknown address"
            text = "the page refused an action without a valid token or certificate from %s"
            self._complaints.warning("the page", text, formatting.plain(address))
            return "", error(401, "this needs the token of an operator", "the autopilot prints where the tokens are")
        return name, None

    def _shown(self, request: Request) -> str:
        """The operator whose certificate the connection has shown; empty: none."""
        pem = request.scope.get("state", {}).get(CERTIFICATE, b"")
        return self.certificates.operator(pem) if self.certificates is not None else ""


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _number(text: str | None) -> int:
    """The number, or 0 if there is none that could be the number of a record."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 18 else 0


class _Headers:
    """Adds the security headers to every answer of a handler.

    Without TLS a page of another site could read this one under a name of its own that leads to 127.0.0.1 (DNS rebinding), so
    other names are refused then. With TLS the certificate prevents that.
    """

    def __init__(self, app: ASGIApp, *, local: bool) -> None:
        self.app, self.local = app, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        app = self.app
        if self.local and not LOCAL.fullmatch(Headers(scope=scope).get("host", "")):
            app = error(421, "the page is served for this machine only, by the address that the autopilot printed")
        await app(scope, receive, with_headers)
