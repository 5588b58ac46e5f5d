"""A function runs with the file-system rights of a user, and nothing else does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.runtime import user_rights

pytestmark = pytest.mark.root

USER, GROUP, OTHER = 1500, 1501, 1502


@pytest.fixture
def folder(open_folder: Path) -> Path:
    return open_folder


def reading(path: Path) -> Callable[[], str]:
    return path.read_text


def test_files_are_opened_as_the_user_could(folder: Path) -> None:
    secret, shared = folder / "secret", folder / "shared"
    for path in (secret, shared):
        path.write_text(path.name)
        path.chmod(0o640)
    os.chown(shared, 0, OTHER)
    with pytest.raises(PermissionError):
        user_rights.call(USER, GROUP, [OTHER], reading(secret))
    with pytest.raises(PermissionError):
        user_rights.call(USER, GROUP, [], reading(shared))
    assert user_rights.call(USER, GROUP, [OTHER], reading(shared)) == "shared"
    assert secret.read_text() == "secret", "the rights of the caller changed"
    assert user_rights.call(0, 0, [], reading(secret)) == "secret"


def test_other_threads_keep_their_rights(folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text("text")
    secret.chmod(0o600)
    inside, leave = threading.Event(), threading.Event()

    def wait() -> bool:
        inside.set()
        return leave.wait(60)

    thread = threading.Thread(target=user_rights.call, args=(USER, GROUP, [], wait))
    thread.start()
    assert inside.wait(60)
    assert secret.read_text() == "text"
    leave.set()
    thread.join()


def test_access_is_that_of_the_user_although_the_process_is_root(folder: Path) -> None:
    path = folder / "file"
    path.write_text("")
    path.chmod(0o644)

    def rights() -> list[bool]:
        handle = os.open(path, os.O_PATH)
        try:
            return [user_rights.may_access(handle, mode) for mode in (os.R_OK, os.W_OK, os.R_OK | os.W_OK, os.X_OK)]
        finally:
            os.close(handle)

    assert user_rights.call(USER, GROUP, [], rights) == [True, False, False, False]
    os.chown(path, USER, GROUP)
    assert user_rights.call(USER, GROUP, [], rights) == [True, True, True, False]
