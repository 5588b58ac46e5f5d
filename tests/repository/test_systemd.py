"""The units load, and keep the promises that the daemon's crash safety rests on."""

import configparser
import json
import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from migrator.cli import program
from snapshotd.api.errors import BadConfig
from snapshotd.config import Config

UNITS = Path(__file__).resolve().parents[2] / "systemd"
SERVICE = "snapshotd.service"
MOUNT = "run-snapshotd-images.mount"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs one of systemd's own programs. tools/setup installs them: without them this fails, it does not skip."""
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def unit(name: str) -> configparser.ConfigParser:
    # No interpolation: systemd's %% is its own. strict: a key given twice is a mistake in these units.
    parser = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((UNITS / name).read_text())
    return parser


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    """systemd's judgement; warnings (an unknown key, say) go to stderr with status 0, so stderr counts as well."""
    return run("systemd-analyze", "verify", folder / SERVICE, folder / MOUNT, SYSTEMD_UNIT_PATH=f"{folder}:")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with a program that exists: systemd-analyze wants ExecStart to be there, and /opt is empty here."""
    for name in (SERVICE, MOUNT):
        shutil.copy(UNITS / name, tmp_path)
    service = tmp_path / SERVICE
    text, count = re.subn(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", service.read_text())
    assert count == 1
    service.write_text(text)
    return tmp_path


def test_systemd_accepts_the_units(installed: Path) -> None:
    verdict = verify(installed)
    ours = [line for line in verdict.stderr.splitlines() if "snapshotd" in line]
    assert (verdict.returncode, ours) == (0, []), verdict.stderr


def test_the_check_would_notice_a_mistake(installed: Path) -> None:
    service = installed / SERVICE
    service.write_text(service.read_text().replace("KillMode=process", "KillMode=proces"))
    assert f"{SERVICE}:" in verify(installed).stderr


def test_the_autopilot_ends_its_moves_first_and_is_never_given_up(installed: Path) -> None:
    name = "migrator-autopilot.service"
    text, count = re.subn(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", (UNITS / name).read_text())
    assert count == 1
    (installed / name).write_text(text)
    verdict = run("systemd-analyze", "verify", "--man=no", installed / name, SYSTEMD_UNIT_PATH=f"{installed}:")
    ours = [line for line in verdict.stderr.splitlines() if "autopilot" in line]
    assert (verdict.returncode, ours) == (0, []), verdict.stderr
    found = unit(name)
    assert found["Unit"]["StartLimitIntervalSec"] == "0"
    assert (found["Service"]["Restart"], found["Service"]["KillMode"]) == ("always", "mixed")
    words = found["Service"]["ExecStart"].split()
    options = program.parser().parse_args(words[1:])
    assert str(options.state) == f"/var/lib/{found['Service']['StateDirectory']}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Type", "notify"),
        ("KillMode", "process"),  # ranks, keepers and criu outlive the daemon
        ("Restart", "always"),
        ("RuntimeDirectory", "snapshotd"),
        ("RuntimeDirectoryPreserve", "yes"),
        ("StateDirectory", "snapshotd"),
        ("StateDirectoryMode", "0700"),
    ],
)
def test_the_service_promises(key: str, value: str) -> None:
    assert unit(SERVICE)["Service"][key] == value


def test_the_service_is_watched_and_never_given_up() -> None:
    service = unit(SERVICE)
    assert service["Service"]["WatchdogSec"]
    assert service["Unit"]["StartLimitIntervalSec"] == "0"
    assert int(service["Service"]["OOMScoreAdjust"]) < 0


def test_no_sandbox_that_a_restored_rank_would_inherit() -> None:
    sandbox = re.compile(
        r"^(Private|Protect|Restrict|SystemCall|NoNewPriv|Lock|MemoryDeny|ReadOnly|Inaccessible|Capab|User)"
    )
    assert [key for key in unit(SERVICE)["Service"] if sandbox.match(key)] == []


def test_the_unit_says_why_it_lacks_each_setting_that_systemd_misses(installed: Path) -> None:
    done = run("systemd-analyze", "security", "--offline=true", "--json=short", installed / SERVICE)
    missed = {str(row["name"]).split("=")[0] for row in json.loads(done.stdout) if row["exposure"]}
    assert len(missed) > 20, done.stdout + done.stderr
    reasons = "".join(line for line in (UNITS / SERVICE).read_text().splitlines() if line.startswith("#"))
    explained = re.findall(r"\b([A-Z]\w+)(…?)=", reasons)  # "Private…=" stands for all that begin so
    for name in missed:
        assert any(name.startswith(word) if dots else name == word for word, dots in explained), name


def test_images_are_on_their_own_tmpfs_for_root_alone() -> None:
    mount = unit(MOUNT)["Mount"]
    assert (mount["What"], mount["Type"], mount["Where"]) == ("tmpfs", "tmpfs", "/run/snapshotd/images")
    options = mount["Options"].replace("%%", "%").split(",")
    assert {"mode=0700", "size=90%", "nosuid", "nodev", "noexec"} <= set(options)
    assert mount["Where"] in unit(SERVICE)["Unit"]["RequiresMountsFor"].split()
    escaped = run("systemd-escape", "--path", "--suffix=mount", mount["Where"])
    assert escaped.stdout.strip() == MOUNT


def test_the_operators_group_and_the_folders_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    users = run("systemd-sysusers", f"--root={tmp_path}", UNITS / "snapshotd.sysusers.conf")
    assert users.returncode == 0, users.stderr
    groups = (tmp_path / "etc/group").read_text()
    gid = int(groups.split("snapshotd-operators:x:")[1].split(":")[0])

    folders = run("systemd-tmpfiles", "--create", f"--root={tmp_path}", UNITS / "snapshotd.tmpfiles.conf")
    assert folders.returncode == 0, folders.stderr
    modes = {
        name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("var/lib/snapshotd", "etc/snapshotd/tls")
    }
    assert modes == {"var/lib/snapshotd": 0o700, "etc/snapshotd/tls": 0o700}
    operators = (tmp_path / "etc/migrator/tls").stat()
    assert (stat.S_IMODE(operators.st_mode), operators.st_gid) == (0o750, gid)


@pytest.mark.parametrize("defaults_too", [False, True])
def test_the_example_names_only_what_the_daemon_knows(defaults_too: bool) -> None:
    text = (UNITS / "snapshotd.toml.example").read_text()
    if defaults_too:
        text, count = re.subn(r"(?m)^# (?=[a-z_]+ = )", "", text)
        assert count > 5
    # The certificates, the user and a tmpfs are not there, which it says; nothing else may be wrong.
    with pytest.raises(BadConfig) as raised:
        Config.from_values(tomllib.loads(text), "the example")
    complaints = str(raised.value).splitlines()[1:]
    assert complaints
    assert not [line for line in complaints if not re.search(r"tls|image_dir|criu|network_user", line)]


def test_the_user_of_the_network_process_is_created() -> None:
    (user,) = (key.default for key in msgspec.structs.fields(Config) if key.name == "network_user")
    assert re.search(rf"(?m)^u {user} - ", (UNITS / "snapshotd.sysusers.conf").read_text())
