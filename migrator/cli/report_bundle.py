"""`migrator report export` and `migrator report verify --bundle`: a signed copy of the event log, and its examination.

Invariant: a bundle is verified without the cluster, the state's folder or a key: with the bundle and a certificate alone.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from migrator.cli import arguments, output
from migrator.cli.status import stamp
from snapshotd.api.errors import BadConfig, Damaged, NotFound, Usage

if TYPE_CHECKING:
    from migrator.autopilot.chain import Record


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="export: file to write; verify: a bundle")
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="verify: bundle to verify instead of the log")
    parser.add_argument(
        "--cert",
        type=Path,
        metavar="FILE",
        help="certificate of the operator who signs (default: the cluster file's) or, to verify a bundle, who signed it",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="export: key of --cert (default: the cluster file's)")


def named(options: argparse.Namespace) -> Path | None:
    """The bundle that the command line names."""
    found: Path | None = options.bundle or options.file
    return found


def check(options: argparse.Namespace) -> None:
    """Raises Usage for options that do not belong together."""
    what = options.what
    if options.file is not None and what == "show":
        raise Usage("a report is printed, not written to a file", remedy="redirect it: migrator report > FILE")
    if what == "export" and options.file is None:
        raise Usage("`report export` needs the name of a file", remedy="write: migrator report export FILE")
    if what == "export" and (options.bundle is not None or options.head):
        raise Usage("--bundle and --head are options of `report verify`", remedy="write: migrator report export FILE")
    if what == "export" and (options.cert is None) != (options.key is None):
        raise Usage("--cert and --key belong together", remedy="give both, or none to use those of the cluster file")
    if what != "export" and options.key is not None:
        raise Usage("--key is an option of `report export`", remedy="a bundle is verified with --cert alone")
    if what == "show" and (options.bundle or options.cert):
        raise Usage("--bundle and --cert are options of `report verify`", remedy="see `migrator report --help`")
    if what == "verify":
        if options.bundle and options.file:
            raise Usage("two bundles are named", remedy="give one of FILE and --bundle FILE")
        if (named(options) is None) != (options.cert is None):
            raise Usage(
                "a bundle and --cert belong together",
                remedy="write: migrator report verify --bundle FILE --cert OPERATOR.crt",
            )


def signer(options: argparse.Namespace) -> tuple[Path, Path]:
    """The certificate and the key to sign with. Call it before any thread exists, as arguments.the_cluster()."""
    if options.cert is not None:
        return options.cert, options.key
    cluster = arguments.the_cluster(options)
    if cluster.tls is None:
        raise BadConfig(
            f"{cluster.origin} names no operator's certificate to sign with; nothing was exported",
            remedy="name one with --cert and --key; `migrator pki operator NAME` creates one",
        )
    return cluster.tls.cert, cluster.tls.key


def export(options: argparse.Namespace, records: list[Record], cert: Path, key: Path) -> int:
    from migrator.autopilot import bundle

    content = bundle.make(records, cert, key, time.time())
    _write(options.file, content)
    head = records[-1].digest if records else ""
    if arguments.wants_json(options):
        values = {"file": str(options.file), "records": len(records), "head": head, "cert": str(cert)}
        output.json_object(values)
    else:
        print(f"wrote {len(records)} records to {options.file}, signed with the key of {cert}")
        print(f"  to verify it: migrator report verify --bundle {options.file.name} --cert {cert.name}")
    return 0


def _write(path: Path, content: bytes) -> None:
    try:
        with open(path, "xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError as error:
        raise Usage(f"{path} exists; nothing was exported", remedy="name another file, or remove this one") from error
    except OSError as error:
        raise Usage(f"{path} cannot be written: {error.strerror}", remedy="name a file you may write") from error


def verify(options: argparse.Namespace) -> int:
    from migrator.autopilot import bundle

    path = named(options)
    assert path is not None
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"there is no bundle {path}", remedy="check its name") from error
    except OSError as error:
        raise Usage(f"{path} cannot be read: {error.strerror}", remedy="name a file you may read") from error
    found = bundle.verify(content, options.cert, options.head)
    manifest, count = found.manifest, len(found.manifest.digests)
    if arguments.wants_json(options):
        output.json_object(
            {
                "valid": not found.problems,
                "records": count,
                "head": found.head,
                "problems": found.problems,
                "operator": manifest.operator,
                "exported_unix_s": manifest.exported_unix_s,
            }
        )
    elif found.problems:
        lines = "\n  ".join(found.problems)
        raise Damaged(f"{path} is not what was signed:\n  {lines}", remedy="get the bundle again from the operator")
    else:
        print(f"{path} is intact: {count} records, signed by {manifest.operator} on {stamp(manifest.exported_unix_s)}")
        print(f"  digest of the last one: {found.head}")
    return Damaged.exit_code if found.problems else 0
