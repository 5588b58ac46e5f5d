"""Records of the daemon in systemd's journal: the socket is a real one, the journal behind it is this test."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.runtime import logs, systemd_journal
from snapshotd.runtime.logs import move_context

LOG = logging.getLogger("snapshotd.moves")


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Receives what is sent to the journal."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(tmp_path / "socket"))
    receiver.settimeout(60)
    monkeypatch.setattr(systemd_journal, "SOCKET", tmp_path / "socket")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield receiver
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    receiver.close()


def lead_stderr_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr leads to the journal, as systemd says in the environment. Not in a fixture: pytest makes a new file for stderr
    when the test itself begins."""
    about = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{about.st_dev}:{about.st_ino}")


def fields(entry: bytes) -> dict[str, str]:
    """As journald reads an entry."""
    found = {}
    while entry:
        name, _, rest = entry.partition(b"\n")
        (length,) = struct.unpack_from("<Q", rest)
        assert rest[8 + length : 9 + length] == b"\n"
        found[name.decode()] = rest[8 : 8 + length].decode()
        entry = rest[9 + length :]
    return found


def test_a_record_of_a_move_has_its_fields(journal: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    lead_stderr_there(monkeypatch)
    logs.set_up("text", "info", node="node-1")
    with move_context(move="m-0123456789ab", rank="job-3-00c0ffee", phase="freeze"):
        LOG.warning("stopped %d processes\nMOVE_ID=m-forged", 4)
    assert fields(journal.recv(65536)) == {
        "MESSAGE": "moves    m-0123456789ab rank job-3-00c0ffee freeze: stopped 4 processes\n    MOVE_ID=m-forged",
        "PRIORITY": "4",
        "LOGGER": "snapshotd.moves",
        "NODE": "node-1",
        "SYSLOG_IDENTIFIER": "snapshotd",
        "MOVE_ID": "m-0123456789ab",
        "RANK": "job-3-00c0ffee",
        "PHASE": "freeze",
    }
    LOG.info("outside of a move")
    assert "MOVE_ID" not in fields(journal.recv(65536))


def test_what_the_journal_does_not_take_is_on_stderr(
    journal: socket.socket, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_stderr_there(monkeypatch)
    logs.set_up("text", "info", node="node-1")
    LOG.info("long %s", "x" * (1 << 23))
    journal.close()
    systemd_journal.SOCKET.unlink()
    LOG.info("no journal")
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("x" * 100)
    assert second.split()[1:] == ["INFO", "moves", "no", "journal"]


@pytest.mark.parametrize("stream", ["", "0:0"])
def test_stderr_elsewhere_gets_text(
    journal: socket.socket, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    logs.set_up("text", "info", node="node-1")
    LOG.info("text")
    journal.setblocking(False)
    with pytest.raises(BlockingIOError):
        journal.recv(1)
    assert capfd.readouterr().err.endswith("moves    text\n")


@pytest.mark.usefixtures("journal")
def test_json_is_written_where_it_was_asked_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_stderr_there(monkeypatch)
    logs.set_up("json", "info", node="node-1")
    LOG.info("text")
    assert capfd.readouterr().err.startswith("{")
