"""Programs are executed by descriptor, with an environment that is listed in full."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from snapshotd.api.errors import BadConfig
from snapshotd.runtime import programs


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def output(program: programs.Program, *arguments: str) -> str:
    done = subprocess.run(
        [*program.argv, *arguments],
        pass_fds=program.fds,
        env=programs.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_program_that_is_replaced_after_the_start_is_not_executed(tmp_path: Path) -> None:
    path = script(tmp_path / "program", 'echo the first "$@"')
    program = programs.opened(str(path))
    script(tmp_path / "other", "echo the second").rename(path)
    assert output(program, "one") == "the first one\n"
    path.unlink()
    assert output(program, "two") == "the first two\n"


def test_environment_of_the_daemon_is_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "CRIU_LIBS_DIR", "HOME", "BASH_ENV", "PYTHONPATH"):
        monkeypatch.setenv(name, "/evil")
    seen = output(programs.opened(str(script(tmp_path / "program", "env"))))
    assert "evil" not in seen
    assert {line.partition("=")[0] for line in seen.splitlines()} <= {"PATH", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}


def test_criu_with_its_own_c_library_is_started_without_its_script(tmp_path: Path) -> None:
    """As tools/get-criu installs it."""
    for name in ("bin", "lib"):
        (tmp_path / name).mkdir()
    script(tmp_path / "criu", "echo the script")
    script(tmp_path / "lib" / "ld-linux-x86-64.so.2", 'echo the loader; echo "$@"; cat "$4"')
    (tmp_path / "bin" / "criu").write_text("the program")
    program = programs.opened(str(tmp_path / "criu"))
    lines = output(program, "swrk", "5").splitlines()
    assert lines[0] == "the loader"
    assert lines[1] == f"--inhibit-cache --library-path {tmp_path}/lib /proc/self/fd/{program.fds[1]} swrk 5"
    assert lines[2] == "the program"
    assert program.plugins == f"{tmp_path}/plugins"


def test_descriptors_are_not_inherited_by_other_children(tmp_path: Path) -> None:
    program = programs.opened(str(script(tmp_path / "program", "true")))
    assert all(not os.get_inheritable(fd) for fd in program.fds)


def test_program_that_does_not_exist_is_a_problem_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="nothing cannot be opened"):
        programs.opened(str(tmp_path / "nothing"))
    with pytest.raises(BadConfig, match="not installed"):
        programs.system("no-such-program")
