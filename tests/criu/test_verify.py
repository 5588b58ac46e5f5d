"""An image is refused before criu reads it, unless it has only what was described and what the node allows."""

from __future__ import annotations

import os
import pwd
import resource
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pycriu import images
from pycriu.images import magic, pb

from snapshotd.api.errors import Damaged, Refused
from snapshotd.criu import image_content, parsers, verify
from snapshotd.criu import images as restore_images
from snapshotd.proc.privileges import Credentials
from snapshotd.runtime import child_process
from snapshotd.sandbox import filter as seccomp

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


def core(*, scheduling: dict[str, int] | None = None, limits: dict[int, int] | None = None, **changes: int) -> Any:
    """`limits`: hard limits by their number."""
    task = pb.task_core_entry(task_state=1, exit_code=0, personality=0, flags=0, blk_sigset=0, comm="rank")
    for number in range(16):
        hard = (limits or {}).get(number, resource.getrlimit(number)[1])
        task.rlimits.rlimits.add(cur=0, max=hard & (1 << 64) - 1)
    thread = pb.thread_core_entry(futex_rla=0, futex_rla_len=0, creds=creds(**changes), **(scheduling or {}))
    return pb.core_entry(mtype=1, tc=task, thread_core=thread)


def zombie() -> Any:
    task = pb.task_core_entry(task_state=6, exit_code=0, personality=0, flags=0, blk_sigset=0, comm="rank")
    return pb.core_entry(mtype=1, tc=task)


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


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Examines images in this process, because a child takes a second to start; except in the tests of the child."""
    if "in_the_child" not in request.node.name:
        monkeypatch.setattr(parsers, "examine", image_content.examine)


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


@pytest.mark.parametrize("number", [0, 3, 9, 1 << 30])
def test_number_that_criu_never_set_for_the_thread_of_a_zombie_is_ignored(folder: Path, number: int) -> None:
    tree = [
        pb.pstree_entry(pid=7, ppid=0, pgid=7, sid=7, threads=[7, 8]),
        pb.pstree_entry(pid=9, ppid=7, pgid=7, sid=7, threads=[number]),
    ]
    write(folder / "pstree.img", "PSTREE", *tree)
    write(folder / "core-9.img", "CORE", zombie())
    assert refusal(folder) == ""
    tree[1].threads.append(8)
    write(folder / "pstree.img", "PSTREE", *tree)
    assert "process 9 has ended and has 2 threads" in refusal(folder)


def test_process_that_is_none_of_its_threads_is_refused(folder: Path) -> None:
    write(folder / "pstree.img", "PSTREE", pb.pstree_entry(pid=7, ppid=0, pgid=7, sid=7, threads=[8]))
    assert "process 7 is not one of its own threads" in refusal(folder)


def end_process_7(folder: Path) -> None:
    write(folder / "pstree.img", "PSTREE", pb.pstree_entry(pid=7, ppid=0, pgid=7, sid=7, threads=[7]))
    write(folder / "core-7.img", "CORE", zombie())
    (folder / "core-8.img").unlink()


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
        "image-credentials: the image lacks process 7": lambda: end_process_7(folder),
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


def test_rank_of_a_user_gets_no_priority_that_is_not_granted(folder: Path) -> None:
    forgeries = {
        "nice -1 (at least 0)": core(scheduling={"sched_policy": 0, "sched_nice": -1}),
        "real-time priority 50 (at most 0)": core(
            scheduling={"sched_policy": 1, "sched_nice": 0, "sched_prio": 50}
        ),  # first in first out
        "real-time priority 1 (at most 0)": core(scheduling={"sched_policy": 2, "sched_nice": 0, "sched_prio": 1}),
        "real-time priority 100 (at most 0)": core(scheduling={"sched_policy": 6, "sched_nice": 0}),  # deadline
    }
    for said, forged in forgeries.items():
        for thread in (7, 8):
            genuine = (folder / f"core-{thread}.img").read_bytes()
            write(folder / f"core-{thread}.img", "CORE", forged)
            assert refusal(folder) == (
                f"image-priorities: the image gives process {thread} more than this node grants: {said}"
            )
            (folder / f"core-{thread}.img").write_bytes(genuine)


@pytest.mark.parametrize("kind", ["NPROC", "NOFILE", "MEMLOCK", "SIGPENDING", "MSGQUEUE", "NICE", "RTPRIO"])
def test_rank_of_a_user_gets_no_limit_above_the_daemons(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    number, hard = getattr(resource, f"RLIMIT_{kind}"), 1 << 40
    monkeypatch.setattr("snapshotd.proc.priorities.resource.getrlimit", lambda _: (hard, hard))
    assert refusal(folder) == ""
    write(folder / "core-7.img", "CORE", core(limits={number: hard + 1}))
    assert f"limit {kind.lower()} {hard + 1} (at most {hard})" in refusal(folder)
    write(folder / "core-7.img", "CORE", core(limits={number: -1}))
    assert f"limit {kind.lower()} unlimited" in refusal(folder)


def test_limits_must_be_where_they_are_examined(folder: Path) -> None:
    """Criu reads limits from a file of their own if the core image has none."""
    forged = core()
    forged.tc.ClearField("rlimits")
    write(folder / "core-7.img", "CORE", forged)
    assert refusal(folder) == "image-content: the image has 0 resource limits of process 7"
    write(folder / "rlimit-7.img", "RLIMIT", pb.rlimit_entry(cur=0, max=0))
    assert refusal(folder) == "image-content: the image contains rlimit-7.img, which no rank has"


def test_ordinary_rank_and_rank_of_root_keep_what_they_have(folder: Path) -> None:
    """Limits that restrict the process alone are no privilege, batch and idle scheduling neither."""
    free = dict.fromkeys((0, 1, 2, 3, 4, 5, 9, 10, 15), -1)
    for policy, nice in ((0, 19), (3, 5), (5, 0)):
        write(folder / "core-7.img", "CORE", core(scheduling={"sched_policy": policy, "sched_nice": nice}, limits=free))
        assert refusal(folder) == ""
    root = dict.fromkeys(("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid"), 0) | {
        "cap_prm": [1 << 21, 0]
    }
    for number in (7, 8):
        forged = core(scheduling={"sched_policy": 1, "sched_nice": -5, "sched_prio": 9}, limits={8: -1}, **root)  # type: ignore[arg-type]
        write(folder / f"core-{number}.img", "CORE", forged)
    assert refusal(folder, ROOT) == ""


def test_login_id_of_another_user_is_not_restored(folder: Path) -> None:
    for login, kept in ((0, (1 << 32) - 1), (1501, (1 << 32) - 1), (USER, USER), ((1 << 32) - 1, (1 << 32) - 1)):
        forged = core()
        forged.tc.loginuid = login
        write(folder / "core-7.img", "CORE", forged)
        restore_images.mend_threads(folder)
        (found,) = image_content._entries({"core": (folder / "core-7.img").read_bytes()}, "core", pb.core_entry)
        assert found.tc.loginuid == kept
        found.tc.loginuid = login
        assert found == forged, "nothing else changes"
    (folder / "core-8.img").write_bytes(b"x" * 12 + b"\xff" * 20)
    with pytest.raises(Damaged, match=r"core-8\.img"):
        restore_images.mend_threads(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"x" * 12, b"x" * 8 + b"\xff" * 4, b"x" * 8 + b"\x05\0\0\0ab"])
def test_truncated_and_absurd_files_are_refused(folder: Path, content: bytes) -> None:
    for name in ("pstree.img", "core-7.img", "ids-7.img", "inventory.img"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        assert refusal(folder), f"{name} {content!r}"
        (folder / name).write_bytes(before)
    (folder / "files.img").write_bytes(content)
    assert refusal(folder)


# ---------------------------------------------------------------- the child


def test_image_is_examined_in_the_child(folder: Path) -> None:
    assert refusal(folder) == ""
    write(folder / "core-8.img", "CORE", core(suid=0))
    assert refusal(folder).startswith("image-credentials: the image gives process 8 the user ids (1500, 1500, 0, ")


def test_broken_image_is_refused_in_the_child(folder: Path) -> None:
    """No module is missing there that the codec imports only when it needs it."""
    (folder / "files.img").write_bytes(b"x" * 8 + b"\xff" * 4)
    assert refusal(folder).startswith("image-content: the image cannot be read: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a child that becomes nobody")
def test_process_in_the_child_has_no_rights_and_no_way_out() -> None:
    child = parsers.spares.take()
    try:
        deadline = time.monotonic() + 60
        while (fields := fields_of(child.pid))["Seccomp"] != ["2"] and seccomp.available():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert fields["Uid"] == fields["Gid"] == ["65534"] * 4
        assert {int(fields[kind][0], 16) for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd")} == {0}
        assert fields["NoNewPrivs"] == ["1"]
        assert int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) > 0, "it must be killed before the daemon is"
        assert f"Max address space {4 << 30}" in " ".join(Path(f"/proc/{child.pid}/limits").read_text().split())
    finally:
        child.kill()
        child.close()


def fields_of(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.split() for key, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_image_whose_examination_fails_in_the_child_is_refused(
    folder: Path, by: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers.spares.add()
    monkeypatch.setattr(parsers, "LIMIT_S", 0.5)
    child = parsers.spares._started[0]
    os.kill(child.pid, by)
    if by is signal.SIGKILL:  # it must not be noticed before it is taken
        monkeypatch.setattr(child.process, "poll", lambda: None)
    assert refusal(folder).startswith("image-content: the process that examines the image ")
    assert child.process.returncode == -signal.SIGKILL


def test_answer_in_the_child_that_is_no_answer_is_a_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that an image controls may say that the image is fine, but nothing else than that or a refusal."""
    monkeypatch.setattr(parsers, "spares", child_process.Spares("tests.criu.lying_parser", most=1))
    assert refusal(folder).startswith("image-content: the process that examines the image failed")
