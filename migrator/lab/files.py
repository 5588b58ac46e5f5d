"""Writes the files of a lab: identities, the operator's cluster file, and each node's configuration and /etc/hosts.

Invariant: the CA's key stays outside the nodes. A node sees its own directory and the operator's, at the same paths as on the
host. Its cluster file does not name the switch's namespace, so `migrator` inside a node uses the node's own network link.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

from migrator.lab.layout import DAEMON_PORT, OPERATOR, LabProcess, Layout, Record, address, write

#: Images and device memory are large, and huge pages make it faster to allocate, map and free them.
_HUGE = ",huge=within_size" if Path("/sys/kernel/mm/transparent_hugepage").exists() else ""
#: The private tmpfs mounts of a node and their options; the rest of the file system is shared.
PRIVATE = (("/run", f"mode=0755,size=90%{_HUGE}"), ("/tmp", "mode=1777,size=50%"), ("/dev/shm", "mode=1777,size=90%"))
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def marker(lab: str, node: str = "") -> str:
    """A directory that exists only in the /run of that node. It identifies the node's processes."""
    return f"/run/.migrator-lab-node/{lab}/{node}".rstrip("/")


def endpoint(record: Record, node: str) -> str:
    return f"{address(record.index(node))}:{DAEMON_PORT}"


def write_all(layout: Layout, record: Record) -> None:
    """Writes all files that do not depend on a process: identities, configurations, hosts."""
    from migrator import pki  # here: cryptography is slow to load and only needed here

    pki.init(layout.run / "pki")
    _give(pki.issue_operator(layout.run / "pki", OPERATOR), layout.operator)
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback", f"{address(None)} {OPERATOR}"]
    lines += [f"{address(index)} {node}" for index, node in enumerate(record.nodes)]
    for node in record.nodes:
        folder = layout.node(node)
        identity = pki.issue_node(layout.run / "pki", node, [address(record.index(node))])
        _give(identity, folder)
        (layout.state / node).mkdir(mode=0o700, parents=True)
        write(folder / "hosts", "\n".join(lines) + "\n")
        write(folder / "cluster.toml", cluster_text(layout, record, None))
        write(folder / "snapshotd.toml", _daemon_text(layout, record, node))
        write(folder / "daemon.log", "", 0o600)


def _give(identity: Any, folder: Path) -> None:
    """Copies an identity, without the CA's key, to the directory where it is used."""
    folder.mkdir(mode=0o755, parents=True)
    for source, name, mode in ((identity.ca, "ca.crt", 0o644), (identity.cert, "tls.crt", 0o644)):
        write(folder / name, source.read_text(), mode)
    write(folder / "tls.key", identity.key.read_text(), 0o600)


def cluster_text(layout: Layout, record: Record, switch: LabProcess | None) -> str:
    """The cluster file; with `switch`, the one for use outside the nodes."""
    lines = [f"# The lab {layout.name}, written by `migrator lab up`."]
    if switch is not None:
        inode = Path(f"/proc/{switch.pid}/ns/net").stat().st_ino
        lines += [f'netns = "/proc/{switch.pid}/ns/net"', f"netns_inode = {inode}"]
    lines += _tls_lines(layout.operator)
    for node in record.nodes:
        lines += [f"[nodes.{node}]", f"endpoint = {json.dumps(endpoint(record, node))}"]
        if node.startswith("spare"):
            lines += [f"[nodes.{node}.labels]", 'spare = "dedicated"']
    return "\n".join(lines) + "\n"


def _daemon_text(layout: Layout, record: Record, node: str) -> str:
    settings: dict[str, object] = {
        "node": node,
        "listen": endpoint(record, node),
        "state_dir": str(layout.state / node),
        "run_dir": "/run/snapshotd",
        "image_dir": "/run/snapshotd/images",
        "memory_claims_dir": str(layout.state / "memory"),  # the nodes share one machine's memory
        "metrics_listen": "127.0.0.1:9470",
        "network_user": "nobody",  # exists everywhere
        # Without /var/tmp, which all nodes of a lab share.
        "carry_paths": ["/tmp", "/dev/shm"],
        # A lab is run by root, who controls all its nodes, and the ranks of the demo run as root.
        "allow_root_ranks": True,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    # Alarms of a lab come from files of its nodes: the kernel's log of the machine is that of all of them, and of its owner.
    health = ["[health]", f"root = {json.dumps(str(layout.node(node) / 'health'))}", "interval_s = 1.0"]
    # Nodes of a lab share the processors of one machine: which rank is slow there says nothing about a node.
    health += ["progress_interval_s = 0"]
    nodes = ["[nodes]", *(f"{other} = {json.dumps(endpoint(record, other))}" for other in record.nodes)]
    return "\n".join([*lines, *_tls_lines(layout.node(node)), *health, *nodes]) + "\n"


def _tls_lines(folder: Path) -> list[str]:
    names = (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))
    return ["[tls]", *(f"{key} = {json.dumps(str(folder / name))}" for key, name in names)]


def prepare_boot(layout: Layout, node: str) -> dict[str, Any]:
    """The mounts of a node, for `inside.hold`. Each call creates a new boot id, as a boot does."""
    folder = layout.node(node)
    write(folder / "boot_id", f"{uuid.uuid4()}\n", 0o444)
    return {
        "tmpfs": PRIVATE,
        "folders": [marker(layout.name, node), "/run/lock", "/run/snapshotd", str(folder), str(layout.operator)],
        "binds": [
            (str(folder), str(folder)),
            (str(layout.operator), str(layout.operator)),
            (str(folder / "cluster.toml"), str(layout.cluster)),
            (str(folder / "hosts"), "/etc/hosts"),
            (str(folder / "boot_id"), BOOT_ID),
        ],
    }


def remove_content(layout: Layout) -> None:
    """Removes all files of the lab, but not its directory, which is the lock."""
    shutil.rmtree(layout.state, ignore_errors=True)
    for entry in layout.run.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def remove_folders(layout: Layout) -> None:
    """Removes the lab's directory, and its parents if they are empty."""
    layout.run.rmdir()
    for folder in (layout.run.parent, layout.state.parent):
        with contextlib.suppress(OSError):  # another lab uses it, or it was never created
            folder.rmdir()
