"""Attacks by a process that maps a file of its own as libsnapshim.so."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.api.errors import GpuFailed
from snapshotd.inprocess import shimctl, symbols
from tests.shim.jobs import Job, compile_c, python, until

MAP = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
FIND = """
import resource, sys
from snapshotd.api.errors import GpuFailed
from snapshotd.inprocess import shimctl
from snapshotd.proc.tree import Process
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
try:
    shimctl.find(Process.of(int(sys.argv[1])))
except GpuFailed as error:
    print(error.message)
"""


def endless_symbols(size: int) -> bytes:
    """A library whose symbol table has as many entries as the file has bytes, each with a name of half the file."""
    names, section_names = b"\xff" * (size // 2), b"\0.dynsym\0.dynstr\0"
    table = size // 2
    headers = 64

    def section(name: int, kind: int, offset: int, length: int, link: int, entry: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, length, link, 0, 1, entry)

    sections = [
        bytes(64),
        section(1, 11, table, size // 2 - 4096, 2, 1),  # .dynsym with entries of one byte
        section(9, 3, 4096, len(names), 0, 0),  # .dynstr
        section(9, 3, headers + 64 * 4, len(section_names), 0, 0),
    ]
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, headers, 0, 64, 56, 0, 64, len(sections), 3
    )
    head = header + b"".join(sections) + section_names
    return head.ljust(4096, b"\0") + names.ljust(size - 4096, b"\x01")


def test_crafted_symbol_table_takes_no_time(tmp_path: Path, jobs: list[Job]) -> None:
    file = tmp_path / "libsnapshim.so"
    file.write_bytes(endless_symbols(8 << 20))
    jobs.append(Job(None, *python(f"{MAP}; print(1, flush=True); input()"), file))
    assert jobs[0].hear() == "1"
    found = subprocess.run(
        [sys.executable, "-c", FIND, str(jobs[0].pid), "20"], capture_output=True, text=True, timeout=600, check=False
    )
    assert "another version of libsnapshim.so" in found.stdout, f"{found.returncode}: {found.stderr}"


@pytest.mark.parametrize("count", [0, 1, 32, 33, 65535])
@pytest.mark.parametrize("note", [(4, 20, 3), (4, 0xFFFFFFFF, 3), (0xFFFFFFFF, 20, 3), (0, 0, 0), (4, 65, 3)])
def test_crafted_header_is_parsed_within_its_page(count: int, note: tuple[int, int, int]) -> None:
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, count, 0, 0, 0)
    notes = struct.pack("<IIQQQQQQ", 4, 4, 2048, 0, 0, 2048, 2048, 4)
    page = (header + notes * min(count, 35)).ljust(2048, b"\0") + struct.pack("<III", *note) + b"GNU\0" + b"\x07" * 20
    found = symbols.build_id_in(page.ljust(4096, b"\0"))
    assert found == (b"\x07" * 20 if note == (4, 20, 3) and count in (1, 32) else None)


def test_forged_build_id_finds_no_mailbox(library: Path, tmp_path: Path, jobs: list[Job]) -> None:
    file = tmp_path / "libsnapshim.so"
    file.write_bytes(library.read_bytes()[:4096].ljust(16 << 20, b"\0"))
    jobs.append(Job(None, *python(f"{MAP}; print(1, flush=True); input()"), file))
    assert jobs[0].hear() == "1"
    with pytest.raises(GpuFailed, match="another version"):
        shimctl.find(jobs[0].process)


def test_unknown_build_is_refused_and_a_known_one_is_not(tmp_path: Path, jobs: list[Job]) -> None:
    """Also the way of an upgrade: a later daemon knows what an earlier installation shipped."""
    source = tmp_path / "other.c"
    source.write_text(
        'struct { char magic[8]; unsigned abi; char rest[4000]; } snapshim_mailbox = {"SNAPSHIM", 4, {0}};\n'
    )
    other = compile_c(source, tmp_path / "libsnapshim.so", "-shared", "-fPIC", "-Wl,--build-id=sha1")
    jobs.append(Job(other, "sleep", "99"))
    until(lambda: "libsnapshim" in Path(f"/proc/{jobs[0].pid}/maps").read_text())
    with pytest.raises(ValueError, match="is not known on this node"):
        symbols.mailbox_address(jobs[0].process, os.getuid(), ("libsnapshim.so",))

    earlier = symbols.Builds()
    earlier.keep_in(tmp_path)
    earlier.learn(other)
    later = symbols.Builds()
    later.keep_in(tmp_path)
    build_id = symbols.build_id_in(other.read_bytes()[:4096])
    assert build_id is not None
    assert later.offset(build_id) == earlier.offset(build_id) is not None


def test_damaged_record_of_builds_is_made_again(library: Path, tmp_path: Path) -> None:
    (tmp_path / "shims.json").write_text("[1")
    builds = symbols.Builds()
    builds.keep_in(tmp_path)
    build_id = symbols.build_id_in(library.read_bytes()[:4096])
    assert build_id is not None
    assert builds.offset(build_id) is not None
    assert build_id.hex() in (tmp_path / "shims.json").read_text()


def test_lines_of_mappings_are_found_by_name() -> None:
    text = b"1 a\n2 libx.so\n3 b\n4 liby.so libx.so\n5 c\n6 liby.so"
    wanted = [b"2 libx.so", b"4 liby.so libx.so", b"6 liby.so"]
    assert symbols._lines_with(text, [b"liby", b"libx"]) == wanted
    assert symbols._lines_with(text + b"\n", [b"libx", b"liby"]) == wanted
    assert symbols._lines_with(b"", [b"libx"]) == []
