"""Writes manual pages and shell completions into the folder of a package: tools/manual.py FOLDER.

They are generated from the parsers of the programs and from the commented example of the configuration, so that they cannot
differ from what the programs accept.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from migrator.cli import program
from snapshotd import __version__
from snapshotd import main as daemon

ROOT = Path(__file__).resolve().parents[1]
DATE = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))


def main(folder: Path) -> None:
    operator, node = program.parser(), daemon.parser()
    write(folder / "usr/share/man/man1/migrator.1.gz", page(operator, 1))
    write(folder / "usr/share/man/man8/snapshotd.8.gz", page(node, 8))
    write(folder / "usr/share/man/man5/snapshotd.toml.5.gz", configuration())
    for shell, path in {
        "bash": "usr/share/bash-completion/completions/migrator",
        "zsh": "usr/share/zsh/vendor-completions/_migrator",
    }.items():
        write(folder / path, shtab.complete(operator, shell=shell))


def page(parser: argparse.ArgumentParser, section: int) -> str:
    made = Manpage(parser)
    made.manual, made.section, made.source, made.date = "Snapshot", str(section), f"snapshotd {__version__}", DATE
    name, summary = parser.prog, (parser.description or "").rstrip(".")
    return str(made).replace(f".SH NAME\n{name}\n", f".SH NAME\n{name} \\- {summary[0].lower()}{summary[1:]}\n", 1)


def configuration() -> str:
    """The example file as a page: its comments are text, its settings are shown literally."""
    lines = [
        f'.TH SNAPSHOTD.TOML 5 "{DATE}" "snapshotd {__version__}" "Snapshot"',
        ".SH NAME",
        r"snapshotd.toml \- configuration of the per-node daemon",
        ".SH SYNOPSIS",
        "/etc/snapshotd/snapshotd.toml",
        ".SH SETTINGS",
    ]
    for line in (ROOT / "systemd" / "snapshotd.toml.example").read_text().splitlines():
        setting = line.removeprefix("# ")
        key, equals, _ = setting.partition(" = ")
        if not line:
            lines.append(".PP")
        elif line.startswith("[") or (equals and key.replace("_", "").isalpha()):
            lines += [".RS", ".nf", escaped(setting), ".fi", ".RE"]
        else:
            lines.append(escaped(setting.removeprefix("#")))
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
