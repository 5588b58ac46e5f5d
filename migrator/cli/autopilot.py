"""`migrator autopilot`: runs the autopilot in the foreground. systemd/migrator-autopilot.service starts it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from migrator import formatting
from migrator.cli import arguments, output, sharing, state
from snapshotd.api import version
from snapshotd.api.errors import Unreachable, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from migrator.autopilot.chain import Record
    from migrator.autopilot.engine import Engine
    from migrator.autopilot.page.serving import Place
    from migrator.autopilot.page.view import Phases
    from migrator.autopilot.policy import Policy
    from migrator.autopilot.store import Store
    from migrator.autopilot.terms import Terms
    from migrator.cluster import Cluster


log = logging.getLogger(__name__)


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "autopilot",
        act,
        "watch the nodes, and move ranks away from nodes in trouble",
        more=(
            "Runs until it is stopped. Without a rule that acts in the policy it only observes. Ctrl-C or SIGTERM lets moves "
            "in progress end first; a second one undoes them where that is possible. It can be killed at any moment: the "
            "next one finds what was in progress."
        ),
        examples=(
            "  migrator autopilot --policy /etc/migrator/policy.toml\n"
            "  migrator autopilot --policy /etc/migrator/policy.toml --metrics 127.0.0.1:9471"
        ),
    )
    parser.add_argument(
        "--metrics",
        type=_address,
        metavar="ADDRESS:PORT",
        help="serve metrics for Prometheus there, at /metrics over plain HTTP (default: none)",
    )
    state.add_policy(parser, required=True)
    state.add_state(parser)
    sharing.add(parser)
    page = parser.add_argument_group("page")
    page.add_argument(
        "--page", type=_address, metavar="ADDRESS:PORT", help="serve a page with the state of the cluster there"
    )
    page.add_argument("--page-cert", type=Path, metavar="FILE", help="certificate of the page (PEM)")
    page.add_argument("--page-key", type=Path, metavar="FILE", help="private key of the page (PEM)")
    page.add_argument(
        "--page-plain-http", action="store_true", help="serve the page without TLS; only on a loopback address"
    )
    page.add_argument(
        "--page-client-ca",
        type=Path,
        metavar="FILE",
        help="also accept certificates of operators of this CA on the page, instead of a token (ca.crt of the cluster)",
    )
    page.add_argument(
        "--page-token-file",
        type=Path,
        metavar="FILE",
        help='lines "NAME TOKEN" of operators who may act on the page (default: page-tokens in the state folder)',
    )
    page.add_argument(
        "--webhook-token-file",
        type=Path,
        metavar="FILE",
        help='take signals at /alertmanager and /signal of the page; lines "NAME TOKEN" of those that may send them',
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ipaddress.ip_address(host)
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not an IP address and a port, as 127.0.0.1:9471 or [::1]:9471"
        ) from None
    return host, int(port)


def act(options: argparse.Namespace) -> int:
    policy = state.the_policy(options)
    # Before the lab's network namespace is entered: its page is for browsers outside, where this command was started.
    page = _page(options)
    cluster = arguments.the_cluster(options)
    folder = state.folder(options, cluster)
    logging.getLogger("migrator").setLevel(logging.INFO)
    from migrator.autopilot import actor

    with actor.only_one(folder):
        sharing.prepare(options, folder)
        asyncio.run(_run(cluster, policy, folder, options.metrics, page, as_json=arguments.wants_json(options)))
    return 0


@dataclass(frozen=True)
class Page:
    place: Place
    listener: socket.socket
    token_file: Path | None  # None: the one in the state folder
    sender_file: Path | None  # tokens of those that may send signals; None: there is no webhook


def _page(options: argparse.Namespace) -> Page | None:
    """Where the page is served. Raises Usage or BadConfig before anything is begun if it cannot be served that way."""
    if options.page is None:
        named = [
            name
            for name in ("cert", "key", "plain_http", "client_ca", "token_file")
            if getattr(options, f"page_{name}")
        ]
        if named:
            raise Usage(f"--page-{named[0].replace('_', '-')} needs --page ADDRESS:PORT")
        if options.webhook_token_file:
            raise Usage("--webhook-token-file needs --page ADDRESS:PORT: signals are taken there, beside the page")
        return None
    from migrator.autopilot.page.serving import Place

    address, port = options.page
    place = Place.of(
        address,
        port,
        options.page_cert,
        options.page_key,
        plain=options.page_plain_http,
        client_ca=options.page_client_ca,
    )
    return Page(place, place.listen(), options.page_token_file, options.webhook_token_file)


async def _run(
    cluster: Cluster,
    policy: Policy,
    folder: Path,
    metrics_at: tuple[str, int] | None,
    page: Page | None,
    *,
    as_json: bool,
) -> None:
    from migrator.autopilot.engine import Engine
    from migrator.autopilot.metrics import Metrics
    from migrator.autopilot.page.view import Phases
    from migrator.autopilot.store import Store
    from snapshotd.api.metrics_http import MetricsServer

    stop, task = asyncio.Event(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    async with Store.open(folder) as store, contextlib.AsyncExitStack() as stack:
        metrics, where, phases, last = Metrics(policy), "", Phases(), await store.last_event()
        if metrics_at is not None:
            await metrics.count_log(store)
            server = MetricsServer(metrics.exposition)
            where = await server.start(*metrics_at, "--metrics")
            stack.push_async_callback(server.close)

        def on_record(record: Record) -> None:
            metrics.count(record)
            show(record, as_json=as_json)

        seen = Seen(on_record)
        pilot: Engine | Terms
        if store.history is None:
            pilot = Engine(cluster, policy, store, on_phase=phases.note, on_round=metrics.round)
            store.on_record = seen
        else:
            pilot = sharing.terms(cluster, policy, store, last, phases, metrics, seen, as_json=as_json)
        acting = [rule.name for rule in policy.rules if rule.action.value != "observe"]
        rules = f"rules that act: {', '.join(acting)}" if acting else "no rule acts: it only observes"
        text = f"migrator {version.described()} with {policy.origin}; {rules}"
        text += f"; metrics at http://{where}/metrics" if where else ""
        await note(store, "start", text, nodes=len(cluster.nodes), policy=policy.origin)
        async with _served(page, pilot, seen, phases, metrics.count_signals):
            with contextlib.suppress(asyncio.CancelledError):  # the second signal
                await pilot.run(stop)
        await note(store, "stop", "stopped by a signal")


@dataclass
class Seen:
    """What gets the records. The page adds itself."""

    on_record: Callable[[Record], None]

    def __call__(self, record: Record) -> None:
        self.on_record(record)


async def note(store: Store, kind: str, text: str, **data: Any) -> None:
    """Records something about this process. If etcd does not answer now, it is not recorded."""
    try:
        await store.note(kind, text, **data)
    except Unreachable as error:
        log.warning("not recorded: %s: %s (%s)", kind, text, error.message)


@contextlib.asynccontextmanager
async def _served(
    page: Page | None, pilot: Engine | Terms, seen: Seen, phases: Phases, counted: Callable[[str, int], None]
) -> AsyncIterator[None]:
    """Serves the page while the context lasts, if there is to be one. Its address is recorded, and so printed."""
    if page is None:
        yield
        return
    from migrator.autopilot.outside import Names
    from migrator.autopilot.page.access import Tokens
    from migrator.autopilot.page.feed import Feed
    from migrator.autopilot.page.serving import serving
    from migrator.autopilot.page.webhook import Webhook

    store, routes = pilot.store, []
    if page.token_file is None:
        tokens, origin = Tokens.of_folder(store.folder)
    else:
        tokens, origin = Tokens.read(page.token_file), page.token_file
    if page.sender_file is not None:
        names, senders = Names(pilot.cluster), Tokens.read(page.sender_file)
        routes = Webhook(store, senders, names, pilot.policy.webhook, counted).routes()
    feed = Feed(store, pilot.shown_world, pilot.policy.spares, phases, pilot.notices, pilot.pace)
    async with serving(page.place, page.listener, feed, tokens, list(pilot.cluster.nodes), routes) as url:
        shown = seen.on_record

        def on_record(record: Record) -> None:
            shown(record)
            feed.wake()

        seen.on_record = on_record
        taken = f", and signals are taken at {url}alertmanager and {url}signal" if routes else ""
        await note(store, "page", f"the page is at {url}{taken}", url=url)
        log.info(
            "the tokens of operators for the page are in %s", origin
        )  # not recorded: everybody can read the record
        yield


def show(record: Record, *, as_json: bool) -> None:
    """One line for each record, as text or as a JSON object."""
    if as_json:
        output.json_object(record.to_json())
    else:
        where = f"{record.node}: " if record.node else ""
        line = formatting.plain(f"{record.kind}: {where}{record.text}")
        print(output.styled(line, "red") if record.kind == "alert" else line, file=sys.stdout, flush=True)
