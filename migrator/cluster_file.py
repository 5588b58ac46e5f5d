"""Edits the text of cluster.toml: adds and removes nodes, and leaves everything else, comments included, as it is.

Invariant: the new text says exactly what the old one said, but for that node. Where that cannot be done, BadConfig says so,
and the file is for a person to edit.
"""

from __future__ import annotations

import json
import re
import tomllib

from snapshotd.api.errors import BadConfig

_HEADER = re.compile(r"\s*\[")


def new_text(operator: str) -> str:
    """A cluster without nodes, for an operator whose files are in tls/ beside it."""
    return (
        "# The cluster, made by `migrator cluster init`. `migrator cluster add` adds nodes; add other settings by hand.\n"
        f'[tls]\nca = "tls/ca.crt"\ncert = "tls/{operator}.crt"\nkey = "tls/{operator}.key"\n'
    )


def with_node(text: str, name: str, endpoint: str, ssh: str, origin: str) -> str:
    wanted = tomllib.loads(text)
    table = {"endpoint": endpoint} | ({"ssh": ssh} if ssh else {})
    wanted.setdefault("nodes", {})[name] = table
    lines = [f"[nodes.{_key(name)}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return _checked(f"{text.rstrip()}\n\n" + "\n".join(lines) + "\n", wanted, origin, f"[nodes.{_key(name)}]")


def without_node(text: str, name: str, origin: str) -> str:
    wanted = tomllib.loads(text)
    del wanted["nodes"][name]
    if not wanted["nodes"]:
        del wanted["nodes"]
    own = re.compile(rf"""\s*\[\s*nodes\s*\.\s*(?:{re.escape(name)}|"{re.escape(name)}"|'{re.escape(name)}')\s*[\].]""")
    lines, kept, skipping = text.splitlines(keepends=True), [], False
    for index, line in enumerate(lines):
        if _HEADER.match(line):
            skipping = bool(own.match(line))
        if not skipping or _precedes_another(lines, index, own):
            kept.append(line)
    return _checked("".join(kept), wanted, origin, f"[nodes.{_key(name)}]")


def _precedes_another(lines: list[str], index: int, own: re.Pattern[str]) -> bool:
    """Comments right before the next table belong to that table."""
    for line in lines[index:]:
        if _HEADER.match(line):
            return not own.match(line)
        if line.strip() and not line.lstrip().startswith("#"):
            return False
    return False


def _key(name: str) -> str:
    return json.dumps(name) if "." in name else name


def _checked(text: str, wanted: dict[str, object], origin: str, table: str) -> str:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        found = {}
    found = found if found.get("nodes") else {key: value for key, value in found.items() if key != "nodes"}
    if found != wanted:
        raise BadConfig(
            f"{origin} is not written as one table for each node; it was not changed", remedy=f"edit {table} by hand"
        )
    return text
