"""Programs of the administrator: what their exit codes and output mean, and which files are not executed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.health.alarms import Severity
from snapshotd.health.check import Now, Unable
from snapshotd.health.event_log import EventLog
from snapshotd.health.programs import Programs, judged
from snapshotd.health.settings import Settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the files must belong to root")
NOW = Now(0.0, 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "etc/snapshotd/health.d"
    made.mkdir(parents=True, mode=0o755)
    return made


def program(folder: Path, name: str, script: str, mode: int = 0o755) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(mode)
    return path


def made(root: Path, limit_s: float = 60.0, off: tuple[str, ...] = ()) -> Programs:
    return Programs(root, Settings(programs_limit_s=limit_s, off=off))


async def test_exit_codes_and_json(tmp_path: Path, folder: Path) -> None:
    program(folder, "fine", "echo all is well")
    program(
        folder, "fans", """echo noise; echo '{"text": "fan 2 stands", "subject": "gpu:GPU-1", "value": 2}'; exit 1"""
    )
    program(folder, "power", "echo supply failed; exit 2")
    program(folder, "broken", "exit 77")
    group = made(tmp_path)
    signals = {signal.check: signal for signal in await group.read(NOW)}
    fans, power = signals["program-fans"], signals["program-power"]
    assert (fans.subject, fans.severity, fans.text, fans.value) == ("gpu:GPU-1", Severity.WARNING, "fan 2 stands", 2.0)
    assert (power.subject, power.severity, power.text) == ("host", Severity.CRITICAL, "supply failed")
    assert set(signals) == {"program-fans", "program-power"}
    assert group.names == ("program-broken", "program-fans", "program-fine", "program-power")
    assert list(group.reasons) == ["program-broken"]
    assert "status 77" in group.reasons["program-broken"]


async def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path, folder: Path) -> None:
    program(folder, "hangs", f"echo $$ > {tmp_path}/pid; sleep 1000 & wait")
    group = made(tmp_path, limit_s=1.0)
    assert await group.read(NOW) == []
    assert "did not end within 1 s" in group.reasons["program-hangs"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_files_that_others_can_change_are_not_executed(tmp_path: Path, folder: Path) -> None:
    ran = tmp_path / "ran"
    program(folder, "writable", f"touch {ran}", mode=0o775)
    other = program(folder, "foreign", f"touch {ran}")
    os.chown(other, 65534, -1)
    (folder / "link").symlink_to(program(tmp_path, "elsewhere", f"touch {ran}"))
    program(folder, "README", f"touch {ran}", mode=0o644)
    program(folder, ".hidden", f"touch {ran}")
    group = made(tmp_path)
    assert await group.read(NOW) == []
    assert set(group.reasons) == {"program-writable", "program-foreign", "program-link"}
    assert not ran.exists()
    folder.chmod(0o777)
    with pytest.raises(Unable, match="can be written by others"):
        await group.read(NOW)


async def test_a_program_that_is_switched_off_does_not_run(tmp_path: Path, folder: Path) -> None:
    program(folder, "fans", f"touch {tmp_path}/ran; exit 2")
    assert await made(tmp_path, off=("program-fans",)).read(NOW) == []
    assert not (tmp_path / "ran").exists()


async def test_without_a_folder_there_are_none(tmp_path: Path) -> None:
    group = made(tmp_path)
    assert await group.read(NOW) == []
    assert group.names == ()


@pytest.mark.parametrize(
    "output",
    [b"", b"[1]", b'{"severity": 7, "subject": "../etc", "value": true, "text": null}', b"\xff\xfe", b"{" * 9000],
)
def test_any_output_gives_an_alarm(output: bytes) -> None:
    result = judged("program-x", Path("/x"), 2, output)
    assert result.signal is not None
    assert (result.signal.subject, result.signal.severity, result.signal.value) == ("host", Severity.CRITICAL, 0.0)
    assert result.signal.text


@pytest.mark.parametrize(
    "said",
    [
        '{"text": "it fails", "value": NaN}',
        '{"text": "it fails", "value": -Infinity}',
        '{"text": "it fails", "value": ' + "9" * 400 + "}",
        '{"text": "it fails\\ud800", "remedy": "\\udfff", "subject": "\\ud800"}',
        "[" * 20_000,
        '{"text": [[1, {"a": 2}]], "value": "5"}',
    ],
)
async def test_what_a_program_passes_on_from_others_spoils_no_log(tmp_path: Path, folder: Path, said: str) -> None:
    (folder / "said").write_text(said)
    program(folder, "hostile", f"cat {folder}/said; exit 2")
    program(folder, "honest", "echo it fails; exit 2")
    signals = await made(tmp_path).read(NOW)
    assert {signal.check for signal in signals} == {"program-hostile", "program-honest"}
    log = EventLog(tmp_path)
    log.add(signals, 1.0)
    assert [alarm.message() for alarm in log.state.alarms.values()]
    assert EventLog(tmp_path).state == log.state, "it can be read again"


@pytest.mark.parametrize("kind", ["another owner", "writable"])
async def test_folder_that_others_can_exchange_is_not_used(tmp_path: Path, folder: Path, kind: str) -> None:
    program(folder, "check", "exit 2")
    above = folder.parent
    os.chown(above, 1500 if kind == "another owner" else 0, 0)
    above.chmod(0o755 if kind == "another owner" else 0o777)
    with pytest.raises(Unable, match=f"{above}, in which"):
        await made(tmp_path).read(NOW)
    os.chown(above, 0, 0)
    above.chmod(0o1777)
    assert len(await made(tmp_path).read(NOW)) == 1, "no other user can replace it there"
