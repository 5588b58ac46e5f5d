"""A node that sends a forged image, with its own certificate, does not get the target to restore it."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pycriu import images
from pycriu.images import pb as criu

from integration.harness import PATIENCE_S, Cluster, until
from integration.security.user_ranks import USER, UserFolder, user_folder

pytestmark = pytest.mark.root

SOURCE, AWAY, TARGET = "node-1", "spare-1", "node-2"

STEPS = """
import os, time
gone = os.open("gone", os.O_RDWR | os.O_CREAT, 0o600)
os.unlink("gone")
step = 0
while True:
    print("step", step, flush=True)
    step += 1
    time.sleep(0.02)
"""

Image = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def folder() -> Iterator[UserFolder]:
    with user_folder() as made:
        yield made


@pytest.fixture(scope="module")
def image(plain_lab: Cluster, folder: UserFolder) -> Image:
    """A genuine image of a user's rank, as it arrived on a node, and the facts about the rank that preflight was shown."""
    job = folder.start(plain_lab, SOURCE, STEPS, "forged")
    job.await_lines(3)
    facts = shown_facts(plain_lab, folder, job.name)
    kept = folder.path / "image"
    with plain_lab.moving(job, AWAY, AWAY, "before-restore") as asked:
        (arrived,) = (plain_lab.run_dir(AWAY) / "images").glob("m-*")
        shutil.copytree(arrived, kept, ignore=shutil.ignore_patterns(".*"))
    assert asked.code == 0, f"{asked}\n{plain_lab.logs()}"
    plain_lab.tidy()
    return kept, facts


def shown_facts(nodes: Cluster, folder: UserFolder, job: str) -> dict[str, Any]:
    settings = {"source": SOURCE, "source_endpoint": endpoint(nodes, SOURCE), "target": TARGET, "job": job}
    path = folder.path / "settings.json"
    path.write_text(json.dumps({**settings, "operator": str(nodes.lab.layout.operator)}))
    return run(nodes, "-m", "integration.security.forger", "facts", str(path))


def run(nodes: Cluster, *arguments: str) -> dict[str, Any]:
    with nodes.lab.spawn("operator", [sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    answer: dict[str, Any] = json.loads(out)
    return answer


def endpoint(nodes: Cluster, node: str) -> str:
    listed = json.loads(nodes.migrator("nodes", "--json").stdout)["nodes"]
    return str(next(one["endpoint"] for one in listed if one["name"] == node))


def sent(nodes: Cluster, image: Image, tmp_path: Path, change: Callable[[Path], None], **facts: Any) -> dict[str, Any]:
    """The target's answer to an image that was changed and sent with the certificate of the source node."""
    folder = tmp_path / "image"
    shutil.copytree(image[0], folder)
    change(folder)
    settings = {
        "target": TARGET,
        "target_endpoint": endpoint(nodes, TARGET),
        "source_endpoint": endpoint(nodes, SOURCE),
        "operator": str(nodes.lab.layout.operator),
        "node": str(nodes.lab.layout.node(SOURCE)),
        "folder": str(folder),
        "facts": {**image[1], **facts},
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    return run(nodes, "-m", "integration.security.forger", "send", str(tmp_path / "settings.json"))


# ---------------------------------------------------------------- changes


def nothing(_folder: Path) -> None:
    pass


def edit(path: Path, kind: Any, change: Callable[[Any], None]) -> None:
    """Changes the first message of an image file; what follows it stays."""
    content = path.read_bytes()
    (size,) = struct.unpack("<I", content[8:12])
    message = kind.FromString(content[12 : 12 + size])
    change(message)
    new = message.SerializeToString()
    path.write_bytes(content[:8] + struct.pack("<I", len(new)) + new + content[12 + size :])


def become_root(folder: Path) -> None:
    """All processes get user 0 and every capability."""

    def change(core: Any) -> None:
        creds = core.thread_core.creds
        for name in ("uid", "euid", "suid", "fsuid", "gid", "egid", "sgid", "fsgid"):
            setattr(creds, name, 0)
        for name in ("cap_prm", "cap_eff"):
            del getattr(creds, name)[:]
            getattr(creds, name).extend([0xFFFFFFFF, 0x1FF])

    for path in folder.glob("core-*.img"):
        edit(path, criu.core_entry, change)


def become_root_everywhere(folder: Path) -> None:
    """The description says so, too."""
    become_root(folder)
    path = folder / "meta.json"
    description = json.loads(path.read_text())
    for process in description.get("tree", {}).get("processes", []):
        who = process["credentials"]
        who |= {"user_ids": [0] * 4, "group_ids": [0] * 4, "permitted": (1 << 41) - 1, "effective": (1 << 41) - 1}
    path.write_text(json.dumps(description))


def get_capabilities(folder: Path) -> None:
    def change(core: Any) -> None:
        for name in ("cap_prm", "cap_eff"):
            del getattr(core.thread_core.creds, name)[:]
            getattr(core.thread_core.creds, name).extend([1 << 21, 0])  # CAP_SYS_ADMIN

    for path in folder.glob("core-*.img"):
        edit(path, criu.core_entry, change)


def open_shadow(folder: Path) -> None:
    """Every regular file that the rank has open becomes /etc/shadow."""
    path = folder / "files.img"
    with path.open("rb") as file:
        table = images.load(file)
    for entry in table["entries"]:
        if entry["type"] == "REG" and entry["reg"]["flags"] & 3 == 2:
            entry["reg"] |= {"name": "/etc/shadow"}
            entry["reg"].pop("mode", None)
    with path.open("wb") as file:
        images.dump(table, file)


def create_a_set_uid_file(folder: Path) -> None:
    (path,) = (path for path in folder.glob("ghost-file-*.img") if path.stat().st_size)

    def change(ghost: Any) -> None:
        ghost.uid, ghost.mode = 0, 0o104755

    edit(path, criu.ghost_file_entry, change)


def mount_something(folder: Path) -> None:
    shutil.copy(folder / "inventory.img", folder / "mountpoints-12.img")


def get_realtime_priority(folder: Path) -> None:
    def change(core: Any) -> None:
        core.thread_core.sched_policy, core.thread_core.sched_prio = 1, 50

    for path in folder.glob("core-*.img"):
        edit(path, criu.core_entry, change)


def get_a_low_nice_value(folder: Path) -> None:
    def change(core: Any) -> None:
        core.thread_core.sched_nice = -20

    for path in folder.glob("core-*.img"):
        edit(path, criu.core_entry, change)


def get_unlimited_locked_memory_and_descriptors(folder: Path) -> None:
    def change(core: Any) -> None:
        for number in (7, 8):
            if core.tc.rlimits.rlimits:
                core.tc.rlimits.rlimits[number].max = (1 << 64) - 1

    for path in folder.glob("core-*.img"):
        edit(path, criu.core_entry, change)


CHANGES: dict[Callable[[Path], None], str] = {
    become_root: "image-credentials",
    become_root_everywhere: "image-credentials",
    get_capabilities: "image-credentials",
    get_realtime_priority: "image-priorities",
    get_a_low_nice_value: "image-priorities",
    get_unlimited_locked_memory_and_descriptors: "image-priorities",
    open_shadow: "image-content",
    create_a_set_uid_file: "image-content",
    mount_something: "image-content",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_forged_image_is_refused(
    plain_lab: Cluster, image: Image, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    answer = sent(plain_lab, image, tmp_path, change)
    assert answer["message"] != "restored", "the target holds a copy that its source made up"
    assert answer["code"] == "undone", answer
    assert f"refused after preflight: {CHANGES[change]}" in answer["message"]


def test_image_of_a_user_that_was_not_shown_is_refused(plain_lab: Cluster, image: Image, tmp_path: Path) -> None:
    answer = sent(plain_lab, image, tmp_path, nothing, userIds=[USER + 1])
    assert "image-credentials" in answer["message"]


def test_genuine_image_is_restored(plain_lab: Cluster, image: Image, tmp_path: Path) -> None:
    """The refusals above have no other cause."""
    answer = sent(plain_lab, image, tmp_path, nothing)
    assert answer["message"] == "restored", f"{answer}\n{plain_lab.logs()}"
    until("the copy to be discarded", lambda: not plain_lab.leftovers())
