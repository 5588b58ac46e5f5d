"""`migrator report`: what the autopilot did, in numbers, and whether its event log is intact (bundles: report_bundle.py)."""

from __future__ import annotations

import argparse
import asyncio
import csv
import html
import io
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from migrator import formatting
from migrator.cli import arguments, output, report_bundle, state
from migrator.cli.status import stamp
from snapshotd.api.errors import Damaged, NotFound, Usage

if TYPE_CHECKING:
    from migrator.autopilot.chain import Record
    from migrator.autopilot.report import Interruption, Report, Share

HEADS = (
    "DETECTED",
    "CLASS",
    "NODE",
    "JOB",
    "RANK",
    "OUTCOME",
    "TO",
    "DECIDED AFTER",
    "PAUSE",
    "LOST",
    "GPU-S",
    "CAUSE",
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add(verbs: arguments.Verbs) -> None:
    parser = verbs.add(
        "report",
        act,
        "show interruptions, what was done about them, and what that saved",
        more=(
            "`migrator report verify` checks that the event log was not changed after it was written. `migrator report "
            "export` writes a signed copy, which can be verified anywhere with the operator's certificate."
        ),
        examples=(
            "  migrator report --since 30d\n"
            "  migrator report --job night --format csv\n"
            "  migrator report verify --head DIGEST\n"
            "  migrator report export log.bundle\n"
            "  migrator report verify --bundle log.bundle --cert alice.crt"
        ),
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("show", "verify", "export"),
        default="show",
        help="show the report (default), verify the log or a bundle, or export a bundle",
    )
    report_bundle.add_options(parser)
    parser.add_argument(
        "--since", type=_span, default=30 * 86400.0, metavar="30d", help="time to look back (default: 30d)"
    )
    parser.add_argument("--job", type=arguments.job, metavar="NAME", help="show only this job")
    parser.add_argument(
        "--format", choices=("text", "json", "csv", "html"), help="format of the report (default: text; --json: json)"
    )
    parser.add_argument(
        "--checkpoint-minutes",
        type=arguments.positive_seconds,
        default=60.0,
        metavar="M",
        help="interval of checkpoints that a restart would begin from (default: 60)",
    )
    parser.add_argument(
        "--restart-minutes",
        type=arguments.positive_seconds,
        default=10.0,
        metavar="M",
        help="time that a restart of a job takes (default: 10)",
    )
    parser.add_argument("--head", metavar="DIGEST", default="", help="verify: a digest that the log must contain")
    state.add_state(parser)


def _span(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a time: use a number and s, m, h or d, as 30d")
    return float(found[1]) * _UNITS[found[2]]


def act(options: argparse.Namespace) -> int:
    report_bundle.check(options)
    if options.what == "verify" and report_bundle.named(options):
        return report_bundle.verify(options)
    if options.what == "export":
        cert, key = report_bundle.signer(options)
        return report_bundle.export(options, _the_log(options), cert, key)
    records = _the_log(options)
    if options.what == "verify":
        return _verify(records, options.head, as_json=arguments.wants_json(options))
    return _show(options, records)


def _the_log(options: argparse.Namespace) -> list[Record]:
    from migrator.autopilot.database import FILE

    known = options.state is not None or "MIGRATOR_STATE" in os.environ
    folder = state.folder(options, None if known else arguments.the_cluster(options))
    if not (folder / FILE).exists():
        raise NotFound(f"there is no event log in {folder}", remedy="name its folder with --state")
    return asyncio.run(_records(folder))


def _show(options: argparse.Namespace, records: list[Record]) -> int:
    from migrator.autopilot import report

    if options.head:
        raise Usage("--head is an option of `report verify`", remedy="write: migrator report verify --head DIGEST")
    now = time.time()
    made = report.build(
        records,
        since_unix_s=now - options.since,
        until_unix_s=now,
        job=options.job or "",
        checkpoint_minutes=options.checkpoint_minutes,
        restart_minutes=options.restart_minutes,
    )
    form = options.format or ("json" if arguments.wants_json(options) else "text")
    {"json": _json, "csv": _csv, "html": _html, "text": _text}[form](made)
    return 0


async def _records(folder: Path) -> list[Record]:
    async with state.opened(folder, changing=False) as store:
        return await store.events()


def _verify(records: list[Record], head: str, *, as_json: bool) -> int:
    from migrator.autopilot import chain

    problems = chain.problems(records, head)
    last = records[-1].digest if records else chain.START
    if as_json:
        output.json_object({"valid": not problems, "records": len(records), "head": last, "problems": problems})
    elif problems:
        lines = "\n  ".join(problems)
        raise Damaged(
            f"the event log is not intact:\n  {lines}", remedy="compare it with a backup of the state's folder"
        )
    else:
        print(f"the event log is intact: {len(records)} records\n  digest of the last one: {last}")
    return Damaged.exit_code if problems else 0


# ---------------------------------------------------------------------- formats


def _json(made: Report) -> None:
    output.json_object(made.to_json())


def _cells(one: Interruption) -> tuple[str, ...]:
    after = one.decided_unix_s - one.detected_unix_s if one.decided_unix_s else None
    return (
        stamp(one.detected_unix_s),
        one.cause_class,
        one.node or "-",
        one.job.partition("/")[2],
        str(one.rank) if one.rank >= 0 else "all",
        one.outcome,
        one.target or "-",
        formatting.seconds(max(0.0, after)) if after is not None else "-",
        formatting.seconds(one.pause_s) if one.pause_s else "-",
        "unknown" if one.lost_s is None else formatting.seconds(one.lost_s) if one.lost_s else "-",
        f"{one.gpu_seconds:.1f}",
        one.cause,
    )


def _percent(share: Share) -> str:
    return "-" if share.percent is None else f"{share.percent:.1f} % ({share.resolved} of {share.all})"


def _headlines(made: Report) -> list[tuple[str, str]]:
    """What matters, as names and values."""
    basis = f"checkpoints every {made.checkpoint_minutes:g} min, restarts of {made.restart_minutes:g} min"
    return [
        ("interruptions resolved without lost progress", _percent(made.total)),
        ("the same without software faults", _percent(made.without_software)),
        *((f"  {name}", _percent(share)) for name, share in made.by_class.items()),
        *([("work lost in rollbacks", _lost(made))] if made.rollbacks else []),
        *([("time lost by suspended jobs", _suspended(made))] if made.suspensions else []),
        ("GPU-seconds that jobs waited for moves", f"{made.gpu_seconds:.1f}"),
        (f"GPU-hours saved ({basis})", f"{made.saved_gpu_hours:.1f}"),
    ]


def _lost(made: Report) -> str:
    known = [one.lost_s for one in made.rollbacks if one.lost_s is not None]
    more = " and more" if len(known) < len(made.rollbacks) else ""
    return f"{sum(known):.0f} s{more} ({len(made.rollbacks)} rollback{'' if len(made.rollbacks) == 1 else 's'})"


def _suspended(made: Report) -> str:
    count = len(made.suspensions)
    return f"{sum(one.lost_s or 0.0 for one in made.suspensions):.0f} s ({count} suspension{'' if count == 1 else 's'})"


def _node_rows(made: Report) -> list[tuple[str, ...]]:
    def shown(value: float | None) -> str:
        return "-" if value is None else formatting.span(value)

    return [(one.node, str(one.failures), shown(one.mtbf_s), shown(one.mttr_s)) for one in made.nodes]


def _text(made: Report) -> None:
    print(f"from {stamp(made.since_unix_s)} to {stamp(made.until_unix_s)}")
    output.grid([(name, value) for name, value in _headlines(made)])
    if made.interruptions:
        print()
        output.table(HEADS, [_cells(one) for one in made.interruptions], right=("RANK", "PAUSE", "LOST", "GPU-S"))
    if made.nodes:
        print()
        output.table(("NODE", "FAILURES", "MTBF", "MTTR"), _node_rows(made), right=("FAILURES", "MTBF", "MTTR"))


def _csv(made: Report) -> None:
    """One line for each interruption. A text that a spreadsheet would take for a formula is preceded by a quote."""
    names = list(made.interruptions[0].to_json()) if made.interruptions else ["rank_uid"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    for one in made.interruptions:
        values = one.to_json()
        values["moves"] = " ".join(one.moves)
        writer.writerow([_safe(values[name]) for name in names])
    sys.stdout.write(text.getvalue())


def _safe(value: object) -> object:
    if not isinstance(value, str):
        return value
    plain = formatting.plain(value)
    return f"'{plain}" if plain[:1] in "=+-@" and plain else plain


def _html(made: Report) -> None:
    """One page without scripts and without anything from elsewhere."""

    def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
        head = "".join(f"<th scope=col>{html.escape(cell)}</th>" for cell in heads)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    style = (
        ":root{color-scheme:light dark}body{font:15px system-ui;margin:2em}table{border-collapse:collapse;"
        "margin:1em 0}td,th{padding:.3em .7em;text-align:left;border-bottom:1px solid #8886}"
    )
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Interruptions</title>',
        f"<style>{style}</style></head><body>",
        f"<h1>Interruptions from {stamp(made.since_unix_s)} to {stamp(made.until_unix_s)}</h1>",
        table(("", ""), [(name.strip(), value) for name, value in _headlines(made)]),
        table(HEADS, [_cells(one) for one in made.interruptions]),
        table(("NODE", "FAILURES", "MTBF", "MTTR"), _node_rows(made)),
        "</body></html>",
    ]
    print(formatting.plain("".join(parts)))
