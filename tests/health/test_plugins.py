"""Checks of other Python packages: the example of the documentation, and packages that are broken in every way."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import BadConfig
from snapshotd.config import Config
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Now, Unable
from snapshotd.health.monitor import Monitor
from snapshotd.health.plugins import MAX_SIGNALS, Plugin
from snapshotd.health.settings import Settings

DOCS = Path(__file__).parents[2] / "docs/operations.md"
IMPORTS = """import os, sys, time
from snapshotd.health.alarms import Severity, Signal
from snapshotd.health.check import Unable
"""
FINE = 'Signal("plugin-acme", "host", Severity.WARNING, "a fan stands")'


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which packages of others are installed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def install(folder: Path, source: str, entry_point: str = "acme = acme_health:check", package: str = "acme") -> None:
    (folder / f"{package}_health.py").write_text(IMPORTS + source)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[snapshotd.health_checks]\n{entry_point}\n")


async def read(limit_s: float = 60.0, name: str = "acme") -> list[Signal]:
    plugin = Plugin(name, Settings(programs_limit_s=limit_s))
    try:
        return await plugin.read(Now.taken())
    finally:
        await plugin.close()


async def test_example_of_the_documentation_works(installed: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```(python|toml)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (source,) = [text for kind, text in blocks if kind == "python" and "snapshotd.health" in text]
    (settings,) = [text for kind, text in blocks if kind == "toml" and "entry_points = [" in text]
    (project,) = [text for kind, text in blocks if kind == "toml" and "[project.entry-points" in text]
    path = tmp_path / "fan1_input"
    path.write_text("120\n")
    assert "/sys/class/hwmon/hwmon0/fan1_input" in source
    source = source.replace("/sys/class/hwmon/hwmon0/fan1_input", str(path))
    entry_point = project.splitlines()[1].replace('"', "")
    install(installed, source, entry_point)
    assert 'entry_points = ["acme"]' in settings
    plugin = Plugin("acme", Settings())
    (found,) = await plugin.read(Now.taken())
    assert (found.check, found.subject, found.severity, found.value) == (
        "plugin-acme-fans",
        "host",
        Severity.WARNING,
        120.0,
    )
    assert (plugin.names, plugin.every_s) == (("plugin-acme", "plugin-acme-fans"), 30.0)
    path.write_text("3000\n")
    assert await plugin.read(Now.taken()) == []
    path.unlink()
    with pytest.raises(Unable, match="FileNotFoundError"):
        await plugin.read(Now.taken())
    await plugin.close()


async def test_object_is_kept_between_readings_and_what_it_prints_is_no_answer(installed: Path) -> None:
    install(
        installed,
        "class Counts:\n"
        "    count = 0\n"
        "    def read(self, now):\n"
        "        print('[]', flush=True); os.write(1, b'{}')\n"
        "        self.count += 1\n"
        "        return [Signal('plugin-acme', 'gpu:GPU-1', Severity.NOTICE, 'x', value=self.count)]\n",
        "acme = acme_health:Counts",
    )
    plugin = Plugin("acme", Settings())
    assert [(await plugin.read(Now.taken()))[0].value for _ in range(3)] == [1.0, 2.0, 3.0]
    await plugin.close()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("this is no Python", "SyntaxError"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("", "AttributeError"),
        ("def check(now): raise ZeroDivisionError('by zero')", "ZeroDivisionError: by zero"),
        ("def check(now): raise Unable('no fans here')", "failed: no fans here"),
        ("def check(now): raise Exception('\\ud800\\x1b[2J')", "failed: Exception: "),
        ("def check(now): os.abort()", "was ended by signal 6"),
        ("def check(now): return None", "TypeError"),
        ("def check(now): return ['hot']", "TypeError: it returned a str instead of a Signal"),
        (f"def check(now): return [{FINE}] * {MAX_SIGNALS + 1}", "more than 64 signals"),
        ("def check(now): return [Signal('gpu-ecc', 'host', Severity.CRITICAL, 'x')]", "may only report plugin-acme"),
        ("def check(now): return [Signal('plugin-acmes', 'host', Severity.CRITICAL, 'x')]", "may only report"),
        ("def check(now): return [Signal('plugin-acme', 'host', 9, 'x')]", "something else than signals"),
        ("def check(now): return [Signal('plugin-acme', 'host', Severity.NOTICE, 'x' * 10**6)]", "failed: "),
    ],
)
async def test_broken_package_is_unable_with_a_reason(installed: Path, source: str, reason: str) -> None:
    install(installed, source)
    with pytest.raises(Unable, match=re.escape(reason)):
        await read()


async def test_nonsense_in_a_signal_is_made_harmless(installed: Path) -> None:
    install(
        installed,
        "def check(now): return [Signal('plugin-acme', 'planet:earth', Severity.NOTICE, 'x', value=float('nan'))]",
    )
    (found,) = await read()
    assert (found.subject, found.value) == ("host", 0.0)


async def test_package_that_hangs_is_killed_with_its_children_and_started_again(
    installed: Path, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    install(
        installed,
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "def check(now):\n"
        f"    while os.path.exists({str(hangs)!r}): time.sleep(1)\n"
        "    return [Signal('plugin-acme', 'host', Severity.NOTICE, f'{os.getpid()} {child.pid}')]\n",
    )
    plugin = Plugin("acme", Settings(programs_limit_s=60.0))
    (first,) = await plugin.read(Now.taken())
    hangs.touch()
    plugin._limit_s = 0.5
    with pytest.raises(Unable, match=r"did not answer within 0\.5 s"):
        await plugin.read(Now.taken())
    for pid in first.text.split():
        async with asyncio.timeout(60):
            while _runs(int(pid)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    hangs.unlink()
    plugin._limit_s = 60.0
    (second,) = await plugin.read(Now.taken())
    assert second.text != first.text
    await plugin.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_entry_point_that_nobody_or_two_packages_have_is_refused(installed: Path) -> None:
    with pytest.raises(Unable, match="no installed package has an entry point acme"):
        await read()
    install(installed, f"def check(now): return [{FINE}]")
    install(installed, "", "acme = other_health:check", "other")
    with pytest.raises(Unable, match="several packages have it: acme_health:check, other_health:check"):
        await read()


async def test_only_what_is_named_and_not_switched_off_is_loaded(installed: Path, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    install(
        installed,
        f"open({str(loaded)!r}, 'a').write(sys.argv[1])\ndef check(now): return [{FINE}]",
        "acme = acme_health:check\nother = acme_health:check",
    )
    root = {"root": str(tmp_path / "root"), "programs_dir": ""}

    async def found(**settings: object) -> tuple[pb.Health, str]:
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)
        monitor = Monitor("n", state, Settings(**root, **settings), str(tmp_path))  # type: ignore[arg-type]
        monitor.start()
        try:
            async with asyncio.timeout(60):
                while not monitor._log.state.alarms and len(monitor._unable) < 7:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return await monitor.since(pb.GetHealthRequest()), loaded.read_text() if loaded.exists() else ""
        finally:
            await monitor.stop()

    health, names = await found()
    assert (names, list(health.alarms)) == ("", [])
    health, names = await found(entry_points=("acme",), off=("plugin-acme",))
    (check,) = [one for one in health.checks if one.name == "plugin-acme"]
    assert (names, check.state) == ("", pb.HealthCheck.OFF)
    only = tuple(check.name for check in health.checks if not check.name.startswith("plugin-"))
    health, names = await found(entry_points=("acme",), off=only)
    assert (names, [alarm.check for alarm in health.alarms]) == ("acme", ["plugin-acme"])


async def test_child_ends_with_the_daemon(installed: Path) -> None:
    install(installed, "def check(now): return [Signal('plugin-acme', 'host', Severity.NOTICE, str(os.getpid()))]")
    plugin = Plugin("acme", Settings())
    (found,) = await plugin.read(Now.taken())
    assert _runs(int(found.text))
    assert plugin._process is not None
    assert plugin._process.stdin is not None
    plugin._process.stdin.close()
    assert await asyncio.wait_for(plugin._process.wait(), 60) == 0
    assert os.getpid() != int(found.text)


def test_names_in_the_configuration_are_checked() -> None:
    for wrong in ({"entry_points": ["../x"]}, {"entry_points": "acme"}, {"entry_points": ["a b"]}, {"off": ["plugin"]}):
        with pytest.raises(BadConfig, match=r"health\.(entry_points|off)"):
            Config.from_values({"health": wrong}, "test")
    assert Settings(entry_points=("acme",), off=("plugin-acme", "plugin-acme-fans")).problems() == []
