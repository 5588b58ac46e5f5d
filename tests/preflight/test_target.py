"""The target's checks: facts about a rank, altered one at a time, compared with this node."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd.api import protocol
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check, FileFact, NodeInfo, ProcessId, Rank, RankFacts
from snapshotd.preflight import examine, recheck, refusals, target
from snapshotd.preflight.digest import content_digest
from snapshotd.preflight.target import TARGET_CHECKS
from snapshotd.proc import host
from snapshotd.proc import priorities as process_priorities
from snapshotd.proc.priorities import UNLIMITED, Priorities
from tests.sampling import DRAWN, examples

GIB = 1 << 30


def node() -> NodeInfo:
    return NodeInfo(
        name="node-2",
        version="0.1.7",
        protocol=protocol.own(),
        kernel=host.kernel(),
        architecture=host.architecture(),
        criu_version="4.2.1",
        memory_available_bytes=16 * GIB,
        image_capacity_bytes=16 * GIB,
        cpu_features=host.cpu_features(),
    )


def facts() -> RankFacts:
    return RankFacts(
        source_node="node-1",
        daemon_version="0.1.0",
        protocol=protocol.own(),
        architecture=host.architecture(),
        cpu_features=host.cpu_features(),
        criu_version="4.2",
        kernel=host.kernel(),
        memory_bytes=4 * GIB,
        directories=["/"],
        user_ids=[0],
    )


def fact_of(path: Path, **changes: object) -> FileFact:
    found = path.stat()
    fact = FileFact(
        path=str(path),
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        mode=found.st_mode,
        user_id=found.st_uid,
        group_id=found.st_gid,
    )
    for name, value in changes.items():
        setattr(fact, name, value)
    return fact


def verdicts(
    report: RankFacts, here: NodeInfo | None = None, carry: tuple[str, ...] = ("/tmp",), **options: object
) -> dict[str, Check]:
    options = {"allow_root": True, **options}  # the tests themselves may run as root
    checks = examine(report, here or node(), carry_paths=carry, **options)  # type: ignore[arg-type]
    assert [check.name for check in checks] == list(TARGET_CHECKS)
    assert all(check.remedy for check in checks if check.verdict != Check.PASS)
    return {check.name: check for check in checks}


def test_priorities_of_a_users_rank_need_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is frozen: the image of such a rank would be refused."""
    grant = Priorities(nice=0, realtime=0, limits={"memlock": 1 << 23, "nofile": 4096})
    monkeypatch.setattr(process_priorities, "granted", lambda: grant)
    shown = facts()
    assert verdicts(shown)["priorities"].verdict == Check.PASS, "a rank of root"
    shown.priorities.limits.update({"memlock": 1 << 23, "nofile": 1024})
    shown.priorities.nice = 5
    assert verdicts(shown)["priorities"].verdict == Check.PASS
    shown.priorities.oom_score_adj = -500
    check = verdicts(shown)["priorities"]
    assert (check.verdict, "-500; on node-2 it will be 0" in check.reason) == (Check.WARN, True)
    for change in ({"nice": -5}, {"realtime": 10}, {"limits": {"memlock": UNLIMITED}}):
        privileged = RankFacts()
        privileged.CopyFrom(shown)
        privileged.priorities.MergeFrom(pb.Priorities(**change))
        check = verdicts(privileged)["priorities"]
        assert check.verdict == Check.REFUSE
        assert "prlimit" in check.remedy
        assert "LimitMEMLOCK=" in check.remedy
    monkeypatch.setattr(
        process_priorities, "granted", lambda: Priorities(-5, 10, dict.fromkeys(grant.limits, UNLIMITED))
    )
    shown.priorities.MergeFrom(pb.Priorities(nice=-5, realtime=10, limits={"memlock": UNLIMITED}, oom_score_adj=1))
    assert verdicts(shown)["priorities"].verdict == Check.PASS


def test_rank_of_root_needs_the_nodes_policy() -> None:
    shown = facts()
    for user_ids, allow_root, verdict in (
        ([0], False, Check.REFUSE),
        ([1500, 0], False, Check.REFUSE),
        ([0], True, Check.PASS),
        ([1500], False, Check.PASS),
    ):
        shown.user_ids[:] = user_ids
        check = verdicts(shown, allow_root=allow_root)["root-rank"]
        assert check.verdict == verdict
        assert verdict == Check.PASS or "allow_root_ranks" in check.remedy


def test_suitable_node_passes_every_check() -> None:
    assert {check.verdict for check in verdicts(facts()).values()} == {Check.PASS}


def needs_newer_target(shown: RankFacts, target: NodeInfo) -> None:
    """The processes of the rank share device memory."""
    shown.protocol.CopyFrom(pb.Protocol(newest=protocol.NEWEST, oldest=protocol.SHARED_DEVICE_MEMORY))
    target.protocol.CopyFrom(pb.Protocol(newest=protocol.SHARED_DEVICE_MEMORY - 1, oldest=2))


ALTERED: dict[str, tuple[Callable[[RankFacts, NodeInfo], None], str, Check.Verdict.ValueType]] = {
    "itself": (lambda f, n: setattr(n, "name", "node-1"), "target-node", Check.REFUSE),
    "other-version": (lambda f, n: setattr(n, "version", "9.2.0"), "daemon-version", Check.PASS),
    "newer-protocol": (
        lambda f, n: n.protocol.CopyFrom(pb.Protocol(newest=9, oldest=8)),
        "daemon-version",
        Check.REFUSE,
    ),
    "wider-protocol": (lambda f, n: n.protocol.CopyFrom(pb.Protocol(newest=9, oldest=1)), "daemon-version", Check.PASS),
    "shared-device-memory": (needs_newer_target, "daemon-version", Check.REFUSE),
    "no-protocol": (lambda f, n: f.ClearField("protocol"), "daemon-version", Check.REFUSE),
    "other-machine": (lambda f, n: setattr(n, "architecture", "riscv64"), "architecture", Check.REFUSE),
    "lacking-cpu": (lambda f, n: f.cpu_features.append("avx9000"), "cpu-features", Check.REFUSE),
    "kernel-flag": (lambda f, n: f.cpu_features.append("ibrs"), "cpu-features", Check.PASS),
    "other-kernel": (lambda f, n: setattr(n, "kernel", "9.9"), "target-kernel", Check.WARN),
    "old-criu": (lambda f, n: setattr(n, "criu_version", "3.17.1"), "target-criu", Check.REFUSE),
    "other-criu": (lambda f, n: setattr(n, "criu_version", "4.3"), "target-criu", Check.REFUSE),
    "patch-criu": (lambda f, n: setattr(n, "criu_version", "4.2.9"), "target-criu", Check.PASS),
    "unknown-user": (lambda f, n: f.user_ids.append(3_999_999_999), "users", Check.WARN),
    "no-memory": (lambda f, n: setattr(n, "memory_available_bytes", 4 * GIB), "memory", Check.REFUSE),
    "no-room": (lambda f, n: setattr(n, "image_held_bytes", 13 * GIB), "image-room", Check.REFUSE),
    "carried-room": (lambda f, n: setattr(f, "carried_bytes", 13 * GIB), "image-room", Check.REFUSE),
    "closed-room": (lambda f, n: f.closed_bytes.update({"/tmp": 1 << 60}), "closed-room", Check.REFUSE),
    "closed-elsewhere": (lambda f, n: f.closed_bytes.update({"/no/such": 1 << 60}), "closed-room", Check.PASS),
    "no-directory": (lambda f, n: f.directories.append("/no/such/place"), "directories", Check.REFUSE),
    "directory-to-make": (lambda f, n: f.directories.append("/tmp/no/such/place"), "directories", Check.PASS),
    "relative-directory": (lambda f, n: f.directories.append("tmp/../etc"), "directories", Check.REFUSE),
}


@pytest.mark.parametrize("case", ALTERED)
def test_altered_facts_are_refused_by_name(case: str) -> None:
    alter, name, verdict = ALTERED[case]
    report, here = facts(), node()
    alter(report, here)
    checks = verdicts(report, here)
    assert checks[name].verdict == verdict
    assert [check.name for check in refusals(checks.values()) if check.name != name] in ([], ["memory"])


def test_memory_check_uses_the_restore_factor() -> None:
    here = node()
    here.memory_available_bytes = 6 * GIB
    assert verdicts(facts(), here)["memory"].verdict == Check.PASS
    assert verdicts(facts(), here, restore_factor=2.0)["memory"].verdict == Check.REFUSE


def test_source_on_the_same_machine_needs_its_part_of_the_memory() -> None:
    here, report = node(), facts()
    here.memory_available_bytes = 13 * GIB
    report.memory_bytes += 5 * GIB
    report.gpu.device_bytes = report.gpu.offloaded_bytes = 5 * GIB
    report.memory_id = "0123"
    apart, check = (
        next(one for one in examine(report, here, carry_paths=(), memory_id=shared) if one.name == "memory")
        for shared in ("4567", "0123")
    )
    assert apart.verdict == Check.PASS
    assert check.verdict == Check.REFUSE
    assert "including 5376 MiB on the source, which shares the memory" in check.reason


@pytest.mark.parametrize(("disk_bytes", "verdict"), [(12 * GIB, Check.PASS), (GIB, Check.REFUSE), (0, Check.REFUSE)])
def test_image_that_has_no_room_in_memory_goes_to_the_disk(disk_bytes: int, verdict: Check.Verdict.ValueType) -> None:
    report, here = facts(), node()
    here.image_held_bytes = here.image_capacity_bytes
    (found,) = (one for one in examine(report, here, carry_paths=(), disk_bytes=disk_bytes) if one.name == "image-room")
    assert found.verdict == verdict
    assert ("goes to the disk" in found.reason) == (verdict == Check.PASS)


def test_memory_that_stays_on_its_gpu_needs_rings_on_both_nodes() -> None:
    """Of 100 GiB; if the source, or this node, puts it into files, it needs as much memory."""
    report, here, names = facts(), node(), {"memory", "image-room"}
    report.memory_bytes += 101 * GIB
    report.gpu.device_bytes, report.gpu.offloaded_bytes = 101 * GIB, 100 * GIB
    report.gpu.held_stripes, report.gpu.slot_bytes = 8, 8 << 20
    report.memory_id = "0123"

    def refused_ones(*, holds: bool, **more: str) -> set[str]:
        checks = examine(report, here, carry_paths=(), holds=holds, **more)  # type: ignore[arg-type]
        return {check.name for check in checks if check.name in names and check.verdict == Check.REFUSE}

    assert refused_ones(holds=True) == set()
    assert refused_ones(holds=False) == names
    assert refused_ones(holds=True, memory_id="0123") == set()
    here.memory_available_bytes = here.image_capacity_bytes = 6 * GIB - 600 * (1 << 20)  # the rings have 512 MiB
    assert refused_ones(holds=True) == {"memory", "image-room"}
    here.memory_available_bytes = here.image_capacity_bytes = 16 * GIB
    report.gpu.held_stripes = 0
    assert refused_ones(holds=True) == names


def the_file(tmp_path: Path) -> tuple[Path, RankFacts, FileFact]:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file:
        return path, facts(), fact_of(path, digest=content_digest(file.fileno(), 7))


def files_check(report: RankFacts, fact: FileFact) -> Check:
    report.files.append(fact)
    return verdicts(report, carry=())["files"]


def test_same_file_passes(tmp_path: Path) -> None:
    _, report, fact = the_file(tmp_path)
    assert files_check(report, fact).verdict == Check.PASS


def test_missing_file_is_refused(tmp_path: Path) -> None:
    path, report, fact = the_file(tmp_path)
    path.unlink()
    check = files_check(report, fact)
    assert check.verdict == Check.REFUSE
    assert f"{path}: does not exist" in check.reason


def test_missing_file_that_the_rank_writes_passes_in_a_shared_directory(tmp_path: Path) -> None:
    """A checkpoint was renamed since the source saw it; on a shared file system its directory is the same."""
    path, report, fact = the_file(tmp_path)
    fact.writable, fact.folder_inode = True, tmp_path.stat().st_ino
    path.unlink()
    assert files_check(report, fact).verdict == Check.PASS
    fact.folder_inode += 1
    del report.files[:]
    assert f"{path}: does not exist" in files_check(report, fact).reason


def test_same_content_with_another_time_passes(tmp_path: Path) -> None:
    path, report, fact = the_file(tmp_path)
    os.utime(path, ns=(0, 1))
    assert files_check(report, fact).verdict == Check.PASS
    fact.digest = b""
    assert "was not compared" in files_check(report, fact).reason


def test_other_content_of_the_same_size_is_refused(tmp_path: Path) -> None:
    path, report, fact = the_file(tmp_path)
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(0, 1))
    assert "other content" in files_check(report, fact).reason


def test_shorter_file_is_refused(tmp_path: Path) -> None:
    path, report, fact = the_file(tmp_path)
    path.write_bytes(b"cont")
    assert "has 4 bytes, on the source 7" in files_check(report, fact).reason


@pytest.mark.parametrize(("mapped", "verdict"), [(False, Check.PASS), (True, Check.REFUSE)])
def test_file_that_has_grown_passes(tmp_path: Path, mapped: bool, verdict: Check.Verdict.ValueType) -> None:
    path, report, fact = the_file(tmp_path)
    with path.open("ab") as file:
        file.write(b" and more")
    fact.mapped = mapped
    assert files_check(report, fact).verdict == verdict


def test_writable_file_only_has_to_exist(tmp_path: Path) -> None:
    path, report, fact = the_file(tmp_path)
    fact.writable, fact.digest = True, b""
    path.write_bytes(b"")
    assert files_check(report, fact).verdict == Check.PASS


def test_other_mode_or_type_is_refused(tmp_path: Path) -> None:
    path, report, fact = the_file(tmp_path)
    path.chmod(0o600)
    assert "has mode 600" in files_check(report, fact).reason
    path.unlink()
    path.mkdir()
    assert "is a directory" in files_check(report, fact).reason


def carried_check(tmp_path: Path, fact: FileFact, **options: object) -> Check:
    report = facts()
    fact.carried = True
    report.files.append(fact)
    return verdicts(report, None, (str(tmp_path),), **options)["carried-files"]


def test_carried_file_replaces_no_other_file(tmp_path: Path) -> None:
    path, _, fact = the_file(tmp_path)
    assert carried_check(tmp_path, fact).verdict == Check.PASS  # identical
    path.write_bytes(b"another process's")
    assert "a file of that name already exists" in carried_check(tmp_path, fact).reason
    assert carried_check(tmp_path, fact, may_replace=lambda name, seen: name == str(path)).verdict == Check.PASS
    path.unlink()
    assert carried_check(tmp_path, fact).verdict == Check.PASS  # free
    path.symlink_to("/etc/passwd")
    assert carried_check(tmp_path, fact).verdict == Check.REFUSE
    fact.path = "/etc/passwd"
    assert "outside this node's carry_paths" in carried_check(tmp_path, fact).reason
    fact.path = f"{tmp_path}/../../etc/passwd"
    assert "outside this node's carry_paths" in carried_check(tmp_path, fact).reason


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights cannot be taken on without root")
def test_carried_file_that_the_user_could_not_own_is_refused_early() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)

        def verdict(user_id: int, group_id: int, mode: int = stat.S_IFREG | 0o644, name: str = "new") -> Check:
            report = facts()
            report.identity.CopyFrom(pb.Identity(user_id=1500, group_id=1500, groups=[1502]))
            report.rank.user_id = 1500
            report.files.add(path=str(folder / name), mode=mode, user_id=user_id, group_id=group_id, carried=True)
            return verdicts(report, None, (str(folder),))["carried-files"]

        for mode in (stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755):
            assert verdict(1500, 1502, mode).verdict == Check.PASS
            assert "it belongs to user 0, not to the rank's" in verdict(0, 1500, mode).reason
            assert "it has group 42, which the rank's user is not in" in verdict(1500, 42, mode).reason
        (folder / "roots").mkdir(mode=0o755)
        assert verdict(0, 0, stat.S_IFDIR | 0o755, "roots").verdict == Check.PASS, "it is there already"


def test_carried_directory_replaces_no_file(tmp_path: Path) -> None:
    folder = FileFact(path=f"{tmp_path}/a/b", mode=stat.S_IFDIR | 0o700)
    assert carried_check(tmp_path, folder).verdict == Check.PASS
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert carried_check(tmp_path, folder).verdict == Check.PASS
    (tmp_path / "a" / "b").rmdir()
    (tmp_path / "a" / "b").write_text("")
    assert "is not a directory" in carried_check(tmp_path, folder).reason
    below = FileFact(path=f"{tmp_path}/a/b/c", mode=stat.S_IFREG | 0o600)
    assert "a directory above it is a file" in carried_check(tmp_path, below).reason


def test_failing_callback_refuses(tmp_path: Path) -> None:
    path, _, fact = the_file(tmp_path)
    path.write_bytes(b"other")

    def broken(name: str, seen: object) -> bool:
        raise RuntimeError("broken")

    check = carried_check(tmp_path, fact, may_replace=broken)
    assert check.verdict == Check.REFUSE
    assert "broken" in check.reason


TEXT = st.text(max_size=40)
PATHS = st.one_of(
    TEXT, st.sampled_from(["/", "/etc", "/etc/passwd", "/tmp", "/dev/zero", "/proc/self/mem", "//", "/a/../b"])
)
SIZES = st.integers(0, 2**64 - 1)
IDS = st.integers(0, 2**32 - 1)
FILES = st.builds(
    FileFact,
    path=PATHS,
    size=SIZES,
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    mode=IDS,
    writable=st.booleans(),
    mapped=st.booleans(),
    carried=st.booleans(),
    user_id=IDS,
    group_id=IDS,
    digest=st.binary(max_size=20),
)
FACTS = st.builds(
    RankFacts,
    rank=st.builds(Rank, process=st.builds(ProcessId, pid=st.integers(-(2**31), 2**31 - 1))),
    source_node=TEXT,
    daemon_version=TEXT,
    architecture=TEXT,
    cpu_features=st.lists(TEXT, max_size=3),
    criu_version=TEXT,
    kernel=TEXT,
    files=st.lists(FILES, max_size=4),
    memory_bytes=SIZES,
    carried_bytes=SIZES,
    closed_bytes=st.dictionaries(PATHS, SIZES, max_size=2),
    directories=st.lists(PATHS, max_size=3),
    user_ids=st.lists(IDS, max_size=3),
    limits=st.dictionaries(TEXT, TEXT, max_size=3),
)


@settings(DRAWN, max_examples=examples(100))
@given(report=FACTS, factor=st.floats(allow_nan=True, allow_infinity=True), carry=st.lists(PATHS, max_size=2))
def test_arbitrary_facts_never_raise(report: RankFacts, factor: float, carry: list[str]) -> None:
    checks = examine(report, node(), carry_paths=carry, restore_factor=factor)
    assert [check.name for check in checks] == list(TARGET_CHECKS)
    for check in checks:
        assert Check.FromString(check.SerializeToString()) == check


@given(report=FACTS, pids=st.lists(st.integers(-5, 2**31), max_size=3))
def test_recheck_of_arbitrary_facts_never_raises(report: RankFacts, pids: list[int]) -> None:
    report.rank.process.pid = 2**22 + 1  # larger than any pid
    assert refusals(recheck(pids, report, carry_paths=["/tmp"], keeper_pid=0).checks)


@pytest.mark.parametrize(
    ("used", "devices", "verdict"),
    [([], 0, Check.PASS), (["mlx5_0"], 2, Check.PASS), (["mlx5_0", "mlx5_1"], 0, Check.REFUSE)],
)
def test_target_of_a_rank_whose_nccl_uses_rdma_needs_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[str], devices: int, verdict: Check.Verdict.ValueType
) -> None:
    """Without one NCCL would choose another network than on the other nodes: seen only after the rank was frozen."""
    monkeypatch.setattr(target, "RDMA_FOLDER", tmp_path)
    for number in range(devices):
        (tmp_path / f"uverbs{number}").touch()
    shown = facts()
    shown.nccl_rdma.extend(used)
    check = verdicts(shown)["target-rdma"]
    assert check.verdict == verdict
    assert ("mlx5_0; mlx5_1" in check.reason) == (verdict == Check.REFUSE)
