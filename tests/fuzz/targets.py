"""The parsers of bytes that a stranger wrote: a user's process, another node, or the kernel quoting a user's names.

Each target takes any bytes and returns, or raises one of its declared errors, which its callers handle. Anything else is a
defect. `tools/fuzz` runs targets for minutes under a coverage-guided fuzzer; `test_targets.py` replays the kept inputs and
mutations of them on every run of the tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash
from pycriu.images import pb

from shim.keeper import frames
from shim.keeper.frames import Frame, FrameError
from shim.keeper.relay import HomeEnd
from shim.keeper.tail import Tail
from snapshotd.api import errors
from snapshotd.api.errors import Damaged, Denied
from snapshotd.criu import image_content
from snapshotd.criu.image_request import Image
from snapshotd.inprocess import nccl_lines, ncclctl, symbols
from snapshotd.keepers import stdio_state as stdio_states
from snapshotd.keepers.hello import parse_hello
from snapshotd.keepers.stdio_state import StdioState
from snapshotd.moves import closed_manifest, description
from snapshotd.preflight import elf
from snapshotd.proc import cgroup_paths, environ, fd, locks, maps, mountinfo, sizes, stat, status
from snapshotd.proc.priorities import Priorities
from snapshotd.proc.privileges import Credentials
from snapshotd.transport.device import records
from snapshotd.transport.device.records import StripeError
from snapshotd.transport.image import frame as image_frame
from snapshotd.transport.image.blocks import Offered

SEEDS = Path(__file__).parent / "seeds"


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(*self.errors):
            self.run(data)


# ---------------------------------------------------------------- from keepers, which run as the user


def keeper_frames(data: bytes) -> None:
    """The stream arrives in pieces; the result must not depend on how it was cut."""
    whole = _decoded([data])
    half = len(data) // 2
    assert _decoded([data[:half], data[half:]]) == whole


def _decoded(pieces: list[bytes]) -> list[Frame] | None:
    decoder = frames.Decoder()
    found: list[Frame] = []
    try:
        for piece in pieces:
            found += decoder.feed(piece)
            assert decoder.pending_bytes <= 4 + frames.MAX_FRAME_BYTES
    except FrameError:
        return None
    return found


def hello(data: bytes) -> None:
    frame = frames.decode(_framed(data))
    for user_id in (0, 1500):
        try:
            found = parse_hello(frame, user_id)
        except Denied:
            continue
        assert found.user_id == user_id
        assert "/" not in found.job + found.uid + found.move
        assert found.role in {"home", "guest"}


def _framed(header: bytes) -> bytes:
    rest = len(header).to_bytes(2, "big") + header if len(header) <= frames.MAX_HEADER_BYTES else b""
    return len(rest).to_bytes(4, "big") + rest


def stdio_state(data: bytes) -> None:
    """What passes is complete and small, and the same on the target, which reads it again."""
    found = stdio_states.decode(data)
    assert {fd for channel in found.channels for fd in channel.fds} <= {0, 1, 2}
    assert found.report_path[:1] in {"", "/"}
    assert "user_id" not in found.to_json()
    assert msgspec.convert(found.to_json(), StdioState) == found


def relay(data: bytes) -> None:
    """A guest keeper on another node: a sequence of frames to the home keeper, whose offsets must stay consistent."""
    end = HomeEnd(_NoLoop(), {"out": Tail(), "err": Tail()}, Tail(), lambda *_: True)  # type: ignore[arg-type]
    end.open()
    end.keyboard.append(b"typed")
    decoder = frames.Decoder()
    for frame in decoder.feed(data):
        try:
            end.receive(frame)
        except (KeyError, TypeError, ValueError):
            continue
        end.pump()
        assert end.exit_status is None or 0 <= end.exit_status <= 0xFFFF
        assert end.keyboard.base <= end.keyboard.end == len(b"typed")


class _NoLoop:
    def after(self, _seconds: float, _call: Callable[[], None]) -> None:
        pass


# ---------------------------------------------------------------- from the memory and files of a rank


def nccl_report(data: bytes) -> None:
    report = ncclctl.parse(os.fsdecode(data))
    for comm in report.comms:
        nccl_lines.check_comm(comm.id)
    report.refusals()


def elf_file(data: bytes) -> None:
    asked_bytes = 0

    def read(offset: int, size: int) -> bytes:
        nonlocal asked_bytes
        asked_bytes += size
        return data[offset : offset + size]

    assert all(isinstance(name, str) for name in elf.parse(read))
    assert asked_bytes <= 256 << 10
    found = symbols.build_id_in(data[:4096])
    assert found is None or found in data


# ---------------------------------------------------------------- from other nodes


def image_header(data: bytes) -> None:
    found = image_frame.parse_header(data)
    if found.kind is image_frame.Kind.DATA:
        assert sum(end - start for start, end in found.runs()) == found.payload_bytes
        assert found.payload_bytes <= image_frame.MAX_CHUNK_BYTES


def image_blocks(data: bytes) -> None:
    """The payload of an offered chunk of 256 KiB."""
    frame = image_frame.Frame(image_frame.Kind.BLOCKS, 1, "pages-1.img", 0, 256 << 10, payload=data)
    found = Offered.parse(frame)
    assert all(len(digest) == image_frame.BLOCK_DIGEST_BYTES for digest in found.digests.values())
    assert all(len(content) == end - start for content, (start, end) in _with_spans(found))


def _with_spans(found: Offered) -> list[tuple[memoryview, tuple[int, int]]]:
    return [(content, found.spans[number]) for number, content in found.contents.items()]


def image_answer(data: bytes) -> None:
    image_frame.parse_answer(data)


def device_record(data: bytes) -> None:
    """The header is signed with a checksum, so a mutated one is never accepted: check the fields behind it as well."""
    header = data[: len(records.Record(records.Kind.END, 0, 0).header())]
    have = int.from_bytes(data[len(header) :][:8], "little")
    if len(header) < len(records.Record(records.Kind.END, 0, 0).header()):
        return
    fields = header[:-8]
    for candidate in (header, fields + xxhash.xxh3_64_digest(fields)):
        try:
            found = records.parse_header(candidate, have)
        except StripeError:
            continue
        assert found.offset == have
        assert found.kind is not records.Kind.SAME or found.twin + found.length <= have
        assert found.length <= records.MAX_RECORD_BYTES


def device_reply(data: bytes) -> None:
    size = len(records.reply(records.Kind.DONE, 0))
    if len(data) >= size:
        _, value, text_bytes = records.parse_reply(data[:size])
        assert text_bytes <= records.MAX_TEXT_BYTES
        records.parse_error(value, data[size : size + text_bytes])


def wire_error(data: bytes) -> None:
    found = errors.from_wire(data)
    assert errors.from_wire(found.to_wire()).code == found.code
    assert "\n" not in found.headline


def image_description(data: bytes) -> None:
    description.decode(data)


def criu_image(data: bytes) -> None:
    """Each file of an image in turn; the others are genuine. It is refused or accepted, never an error of the codec."""
    genuine = {f"{path.name}.img": path.read_bytes() for path in sorted((SEEDS / "criu-image").iterdir())}
    genuine["core-8.img"] = genuine["core-7.img"]
    for name in genuine:
        files = genuine | {name: data}
        image = Image(list(files), files, {7: (_WHO, {})}, ["/lib/libc.so", "/tmp/gone"], _GRANTED)
        found = image_content.examine(image)
        assert found is None or found.reason
        if name.startswith("core-") and found is None:
            (core,) = image_content._entries(files, name, pb.core_entry)
            assert core.thread_core.sched_nice >= 0
            assert {core.thread_core.creds.uid, core.thread_core.creds.euid, core.thread_core.creds.suid} == {1500}


_GRANTED = Priorities(nice=0, realtime=0, limits={"nofile": 1024, "memlock": 1 << 23})
_WHO = Credentials((1500,) * 4, (1500,) * 4, (1500, 1600), 0, 0, 0, 0, no_new_privs=False, seccomp=0)


def closed_files(data: bytes) -> None:
    """A row that passes must name a path below its carry path, which the file system can be asked for."""
    for row in closed_manifest.parse_manifest(data).rows:
        closed_manifest.must_be_valid(row)
        parts = os.fsencode(row.path).split(b"/")
        assert not {b"", b".", b".."} & set(parts), row.path
        assert b"\0" not in os.fsencode(row.path) + os.fsencode(row.link)


# ---------------------------------------------------------------- from the kernel, which quotes names that users chose


def proc_names(data: bytes) -> None:
    """The kernel's lines around a name that a user chose: no name may change another field."""
    name = data.replace(b"\0", b"")[:15]
    text = os.fsdecode(name)
    found = stat.parse(f"41 ({text}) S 1 2 3 0 -1 0 0 0 0 0 0 0 0 0 20 0 4 0 777 0\n")
    assert (found.pid, found.name, found.state, found.parent, found.start_ticks) == (41, text, "S", 1, 777)
    quoted = text.replace("\\", "\\\\").replace("\n", "\\n")
    assert (
        status.parse(
            f"Name:\t{quoted}\nUid:\t7\t7\t7\t7\nGid:\t7\t7\t7\t7\nPid:\t41\nNSpid:\t41\t2\nTracerPid:\t0\n"
        ).user_id
        == 7
    )

    path = b"/tmp/" + data.replace(b"\0", b"").replace(b"\n", b"\\012")
    line = b"7f00-8f00 r-xp 00001000 08:01 55                         " + path + b"\n"
    mapping = next(maps.parse(line + b"9000-a000 rw-p 00000000 00:00 0 \n"))
    assert (mapping.span, mapping.inode, mapping.executable, mapping.writable) == ("7f00-8f00", 55, True, False)
    assert maps.parse_inodes(line) == {(os.makedev(8, 1), 55)}

    escaped = os.fsdecode(path)
    for sign in "\\ \t\n":
        escaped = escaped.replace(sign, f"\\{ord(sign):03o}")
    mount = f"20 1 0:3 / {escaped} rw - fuse.x source rw,user_id=1500\n"
    assert [each.kind for each in mountinfo.parse(mount + "21 1 0:4 / /x rw - tmpfs t rw\n")] == ["fuse.x", "tmpfs"]
    group = os.fsdecode(data.replace(b"\0", b"").replace(b"\n", b""))
    assert [each.unified for each in cgroup_paths.parse(f"3:cpu:/{group}\n0::/{group}\n")] == [False, True]


def proc_text(data: bytes) -> None:
    """Whole files: parsers of tables that skip what they do not know."""
    text = os.fsdecode(data)
    list(locks.parse(text))
    list(maps.parse(data))
    maps.parse_inodes(data)
    assert all("\0" not in name + value for name, value in environ.parse(text).items())
    for parse in (stat.parse, status.parse, fd.parse_info, mountinfo.parse, cgroup_paths.parse, sizes.parse_anonymous):
        try:
            parse(text)
        except (ValueError, KeyError, IndexError):
            continue


TARGETS = {
    "keeper-frames": Target(keeper_frames, ()),
    "hello": Target(hello, (FrameError,)),
    "relay": Target(relay, (FrameError,)),
    "nccl-report": Target(nccl_report, (Damaged,)),
    "elf": Target(elf_file, ()),
    "image-header": Target(image_header, (Damaged,)),
    "image-blocks": Target(image_blocks, (Damaged,)),
    "image-answer": Target(image_answer, (Damaged,)),
    "device-record": Target(device_record, ()),
    "device-reply": Target(device_reply, (StripeError,)),
    "stdio-state": Target(stdio_state, (ValueError,)),
    "wire-error": Target(wire_error, ()),
    "criu-image": Target(criu_image, ()),
    "image-description": Target(image_description, (Damaged,)),
    "closed-files": Target(closed_files, (Damaged,)),
    "proc-names": Target(proc_names, ()),
    "proc-text": Target(proc_text, ()),
}


def seeds(name: str) -> list[bytes]:
    """The kept inputs of a target: valid ones, and those that once found a defect."""
    return [path.read_bytes() for path in sorted((SEEDS / name).iterdir())]
