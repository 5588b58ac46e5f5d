"""An image is refused before criu reads it, unless it has only what was described and what the node allows."""

from __future__ import annotations

import os
import pwd
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pycriu import images
from pycriu.images import magic, pb

from snapshotd.api.errors import Refused
from snapshotd.criu import verify
from snapshotd.proc.privileges import Credentials

USER = 1500
WHO = Credentials(
    user_ids=(USER,) * 4,
    group_ids=(USER,) * 4,
    groups=(USER, 1600),
    inheritable=0,
    permitted=0,
    effective=0,
    ambient=0,
    no_new_privs=False,
    seccomp=0,
)
ROOT = msgspec.structs.replace(WHO, user_ids=(0,) * 4, group_ids=(0,) * 4, permitted=1 << 21)


# ---------------------------------------------------------------- policy


def allowed(who: Credentials, shown: tuple[int, ...] = (USER,), *, allow_root: bool = False) -> str:
    try:
        verify.must_be_allowed(who, shown, allow_root=allow_root)
    except Refused as refusal:
        return refusal.message
    return ""


def with_(**changes: Any) -> Credentials:
    return msgspec.structs.replace(WHO, **changes)


def test_user_that_preflight_was_shown_is_allowed() -> None:
    assert allowed(WHO) == ""
    assert "user 1500, whom preflight was not shown" in allowed(WHO, (1501,))
    assert "user 0" in allowed(with_(user_ids=(USER, USER, 0, USER))), "a saved user id is one, too"


def test_root_and_capabilities_need_the_operators_policy() -> None:
    assert allowed(ROOT, (0,)).startswith("root-rank: ")
    assert allowed(ROOT, (0,), allow_root=True) == ""
    for name in ("permitted", "effective", "ambient"):
        assert "capabilities" in allowed(with_(**{name: 1 << 21}))
    assert allowed(with_(permitted=1 << 21), allow_root=True) == ""


def test_groups_are_those_of_the_user_on_this_node() -> None:
    assert "groups 42" in allowed(with_(groups=(42, USER))), "no system group for a user without an account here"
    assert "groups 0" in allowed(with_(group_ids=(0, USER, USER, USER)))
    account = next(one for one in pwd.getpwall() if one.pw_uid not in (0, USER))
    own = tuple(os.getgrouplist(account.pw_name, account.pw_gid))
    user = with_(user_ids=(account.pw_uid,) * 4, group_ids=(account.pw_gid,) * 4, groups=own)
    assert allowed(user, (account.pw_uid,)) == ""
    assert "groups 54321" in allowed(msgspec.structs.replace(user, groups=(*own, 54321)), (account.pw_uid,))


# ---------------------------------------------------------------- images


def write(path: Path, kind: str, *messages: Any) -> None:
    content = struct.pack("<I", magic.by_name[kind])
    if kind != "INVENTORY":
        content = struct.pack("<I", magic.by_name["IMG_COMMON"]) + content
    for message in messages:
        packed = message.SerializeToString()
        content += struct.pack("<I", len(packed)) + packed
    path.write_bytes(content)


def creds(**changes: int) -> Any:
    numbers = dict.fromkeys(("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid"), USER)
    words: dict[str, Any] = {name: [0, 0] for name in ("cap_inh", "cap_prm", "cap_eff", "cap_bnd", "cap_amb")}
    return pb.creds_entry(**{**numbers, **words, "secbits": 0, "groups": [1600, USER], **changes})


def core(**changes: int) -> Any:
    task = pb.task_core_entry(task_state=1, exit_code=0, personality=0, flags=0, blk_sigset=0, comm="rank")
    thread = pb.thread_core_entry(futex_rla=0, futex_rla_len=0, creds=creds(**changes))
    return pb.core_entry(mtype=1, tc=task, thread_core=thread)


def ids(**changes: int) -> Any:
    numbers = dict.fromkeys(("vm_id", "files_id", "fs_id", "sighand_id"), 1)
    numbers |= {f"{name}_ns_id": 9 for name in ("pid", "net", "ipc", "uts", "mnt", "user", "cgroup", "time")}
    return pb.task_kobj_ids_entry(**{**numbers, **changes})


FOWN = {"uid": 0, "euid": 0, "signum": 0, "pid_type": 0, "pid": 0}


def reg(number: int, name: str) -> dict[str, Any]:
    return {"type": "REG", "id": number, "reg": {"id": number, "flags": 0, "pos": 0, "fown": FOWN, "name": name}}


def store_files(folder: Path, *entries: dict[str, Any], remaps: tuple[dict[str, Any], ...] = ()) -> None:
    for name, kind, content in (("files", "FILES", list(entries)), ("remap-fpath", "REMAP_FPATH", list(remaps))):
        with (folder / f"{name}.img").open("wb") as file:
            images.dump({"magic": kind, "entries": content}, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The image of a process with two threads and an unlinked file."""
    tree = pb.pstree_entry(pid=7, ppid=0, pgid=7, sid=7, threads=[7, 8])
    write(tmp_path / "pstree.img", "PSTREE", tree)
    write(tmp_path / "inventory.img", "INVENTORY", pb.inventory_entry(img_version=2, root_ids=ids(time_ns_id=1)))
    write(tmp_path / "ids-7.img", "IDS", ids())
    for number in (7, 8):
        write(tmp_path / f"core-{number}.img", "CORE", core())
    ghost = {"orig_id": 2, "remap_id": 1, "remap_type": "GHOST"}
    store_files(tmp_path, reg(1, "/lib/libc.so"), reg(2, "/tmp/gone"), remaps=(ghost,))
    write(tmp_path / "ghost-file-1.img", "GHOST_FILE", pb.ghost_file_entry(uid=USER, gid=1600, mode=0o100600))
    return tmp_path


PATHS = {"/lib/libc.so", "/tmp/gone"}


def refusal(folder: Path, who: Credentials = WHO, threads: dict[int, Credentials] | None = None) -> str:
    try:
        verify.must_match(folder, {7: (who, threads or {})}, PATHS)
    except Refused as found:
        return found.message
    return ""


def test_image_as_it_was_described_passes(folder: Path) -> None:
    assert refusal(folder) == ""
    write(folder / "core-8.img", "CORE", core(uid=1501))
    assert refusal(folder, threads={8: with_(user_ids=(1501, USER, USER, USER))}) == ""


def image_files(folder: Path) -> dict[str, Callable[[], None]]:
    """The forgeries, each with the start of the refusal."""

    def edit(name: str, kind: str, message: Any) -> Callable[[], None]:
        return lambda: write(folder / name, kind, message)

    capability: Any = {"cap_prm": [1 << 21, 0]}
    device = pb.ghost_file_entry(uid=USER, gid=USER, mode=0o060600, rdev=1)
    special = pb.ghost_file_entry(uid=USER, gid=USER, mode=0o104755)
    return {
        "image-credentials: the image gives process 7 the user ids (1500, 0, ": edit(
            "core-7.img", "CORE", core(euid=0)
        ),
        "image-credentials: the image gives process 8 the user ids (1500, 1500, 0, ": edit(
            "core-8.img", "CORE", core(suid=0)
        ),
        "image-credentials: the image gives process 8 the permitted": edit("core-8.img", "CORE", core(**capability)),
        "image-credentials: the image gives process 7 the groups": edit("core-7.img", "CORE", core(groups=[0])),  # type: ignore[arg-type]
        "image-credentials: the image gives process 7 the securebits": edit("core-7.img", "CORE", core(secbits=1)),
        "image-credentials: the image gives process 7 the no_new_privs": edit(
            "core-7.img", "CORE", core(no_new_privs=1)
        ),
        "image-credentials: the image lacks process 7": edit(
            "core-7.img",
            "CORE",
            pb.core_entry(
                mtype=1, tc=pb.task_core_entry(task_state=6, exit_code=0, personality=0, flags=0, blk_sigset=0, comm="")
            ),
        ),
        "image-content: the image contains core-9.img": edit("core-9.img", "CORE", core(uid=0)),
        "image-content: the image contains mountpoints-12.img": edit("mountpoints-12.img", "MNTS", core()),
        "image-content: the image contains binfmt-misc-1.img": edit("binfmt-misc-1.img", "BINFMT_MISC", core()),
        "image-content: the image would put process 7 into a new mnt": edit("ids-7.img", "IDS", ids(mnt_ns_id=3)),
        "image-content: the image would put process 7 into a new user": edit("ids-7.img", "IDS", ids(user_ns_id=3)),
        "image-content: the image creates a file with the mode 60600": edit("ghost-file-1.img", "GHOST_FILE", device),
        "image-content: the image creates a file with the mode 104755": edit("ghost-file-1.img", "GHOST_FILE", special),
        "image-content: the image creates a file of user 0": edit(
            "ghost-file-1.img", "GHOST_FILE", pb.ghost_file_entry(uid=0, gid=USER, mode=0o100600)
        ),
        "image-content: the image opens '/etc/shadow'": lambda: store_files(folder, reg(1, "/etc/shadow")),
        "image-content: the image opens '/tmp/../etc/shadow'": lambda: store_files(
            folder, reg(1, "/tmp/../etc/shadow")
        ),
        "image-content: the image cannot be read": lambda: (folder / "core-7.img").unlink(),
    }


@pytest.mark.parametrize("number", range(18))
def test_forged_image_is_refused(folder: Path, number: int) -> None:
    forgeries = image_files(folder)
    assert len(forgeries) == 18
    said, forge = list(forgeries.items())[number]
    forge()
    assert refusal(folder).startswith(said), refusal(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"x" * 12, b"x" * 8 + b"\xff" * 4, b"x" * 8 + b"\x05\0\0\0ab"])
def test_truncated_and_absurd_files_are_refused(folder: Path, content: bytes) -> None:
    for name in ("pstree.img", "core-7.img", "ids-7.img", "inventory.img"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        assert refusal(folder), f"{name} {content!r}"
        (folder / name).write_bytes(before)
    (folder / "files.img").write_bytes(content)
    assert refusal(folder)
