"""snapshotd/inprocess/abi.py is generated from shim/lib/abi.h; both it and the compiler must agree with that file."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.inprocess import abi, shimctl
from snapshotd.proc import foreign_memory, tree
from tests.shim.jobs import REPOSITORY, compile_c

PROGRAM = """
#include <stddef.h>
#include <stdio.h>
#include "abi.h"
int main(void)
{
%s
	printf("size %%zu\\n", sizeof(struct snapshim_mailbox));
	return 0;
}
"""


def test_committed_abi_module_is_current() -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "gen-abi"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_compiler_agrees_with_every_offset(tmp_path: Path) -> None:
    members = list(abi.MailboxFields._fields)
    lines = [f'\tprintf("{name} %zu\\n", offsetof(struct snapshim_mailbox, {name}));' for name in members]
    source = tmp_path / "offsets.c"
    source.write_text(PROGRAM % "\n".join(lines))
    program = compile_c(source, tmp_path / "offsets", f"-I{REPOSITORY / 'shim' / 'lib'}")
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    expected = {name: int(abi.Offset[name.upper()]) for name in members}
    assert dict(line.split() for line in printed.splitlines()) == {
        **{name: str(offset) for name, offset in expected.items()},
        "size": str(abi.MAILBOX_BYTES),
    }


@pytest.mark.parametrize("behind", [b"", b"=0,1,2"])
def test_mailbox_of_an_older_library_is_read_without_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    """It ends before `visible`. Behind it is other memory of the process, or none."""
    box = bytearray(abi.Offset.VISIBLE)
    struct.pack_into("<8sIIi", box, 0, b"SNAPSHIM", abi.ABI_VERSION, len(box), os.getpid())
    monkeypatch.setattr(foreign_memory, "read", lambda *_, **__: bytes(box) + behind)
    state = shimctl.Mailbox(tree.Process.of(os.getpid()), 4096, os.getuid()).state()
    assert (state.parked, state.visible) == (False, None)
