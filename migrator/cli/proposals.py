"""`migrator proposals`, `approve` and `reject`: what the autopilot would do if an operator approves."""

from __future__ import annotations

import argparse
import asyncio
import functools
from typing import TYPE_CHECKING, Any

import msgspec

from migrator import formatting
from migrator.cli import arguments, output, state

if TYPE_CHECKING:
    from pathlib import Path

    from migrator.autopilot.model import Proposal


def add(verbs: arguments.Verbs) -> None:
    listed = verbs.add(
        "proposals",
        _list,
        "list what the autopilot would do if an operator approves",
        more="A proposal is in the list as long as its cause is there, also after its answer.",
        examples="  migrator proposals",
    )
    approve = verbs.add(
        "approve",
        functools.partial(_answer, True),
        "approve a proposal of the autopilot",
        more="The autopilot then acts, within the limits of its policy. The answer ends with the cause of the proposal.",
        examples="  migrator approve 7",
    )
    reject = verbs.add(
        "reject",
        functools.partial(_answer, False),
        "reject a proposal of the autopilot",
        more="The same is not proposed again as long as its cause is there.",
        examples='  migrator reject 7 --reason "the job ends within the hour"',
    )
    for parser in (approve, reject):
        parser.add_argument("id", type=int, metavar="ID", help="number of the proposal")
        parser.add_argument("--reason", default="", metavar="TEXT", help="reason for the record")
        parser.add_argument("--dry-run", action="store_true", help="show what would be answered, and change nothing")
    for parser in (listed, approve, reject):
        state.add_state(parser)


def _folder(options: argparse.Namespace) -> Path:
    return state.folder(options, arguments.the_cluster(options))


def _list(options: argparse.Namespace) -> int:
    found = asyncio.run(_load(_folder(options)))
    if arguments.wants_json(options):
        output.json_object({"proposals": [_json(one) for one in found]})
    elif found:
        rows = [(str(one.id), one.state.value, one.by or "-", one.what, one.why) for one in found]
        output.table(("ID", "STATE", "BY", "WHAT", "WHY"), rows, right=("ID",))
    else:
        print("the autopilot proposes nothing")
    return 0


async def _load(folder: Path) -> tuple[Proposal, ...]:
    async with state.opened(folder, changing=False) as store:
        return await store.proposals()


def _answer(approved: bool, options: argparse.Namespace) -> int:
    answered = asyncio.run(_record(_folder(options), options.id, approved, options.reason, options.dry_run))
    word = "approved" if approved else "rejected"
    if arguments.wants_json(options):
        output.json_object({**_json(answered), "state": word, "dry_run": options.dry_run})
    else:
        verb = "would be" if options.dry_run else "is"
        print(formatting.plain(f"proposal {answered.id} {verb} {word}: {answered.what}"))
    return 0


async def _record(folder: Path, number: int, approved: bool, reason: str, dry_run: bool) -> Proposal:
    from snapshotd.api.errors import NotFound

    async with state.opened(folder, changing=not dry_run) as store:
        if not dry_run:
            return await store.answer_proposal(number, approved, state.operator(), reason)
        known = next((one for one in await store.proposals() if one.id == number), None)
        if known is None:
            raise NotFound(f"there is no open proposal {number}", remedy="`migrator proposals` lists them")
        return known


def _json(proposal: Proposal) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(proposal)
    return made
