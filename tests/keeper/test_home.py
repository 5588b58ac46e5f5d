"""Tests that a rank under a home keeper looks to its launcher as it does without one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from snapshotd.proc.tree import Process
from tests.installation import NOBODY, readable_copy, readable_python
from tests.keeper.nodes import Node, python, until


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -TERM $$"), -signal.SIGTERM),
        (("sh", "-c", "kill -KILL $$"), -signal.SIGKILL),
        (("sh", "-c", "kill -SEGV $$"), -signal.SIGSEGV),
        (("no-such-program-anywhere",), 127),
        (("/etc/passwd",), 126),
    ],
)
async def test_keeper_exits_with_the_status_of_the_rank(node: Node, argv: tuple[str, ...], code: int) -> None:
    keeper = await node.launch(*argv)
    _, errors = await keeper.communicate()
    assert keeper.returncode == code
    assert (b"cannot start" in errors) == (code in (126, 127))
    link = await node.reported("closed", False)
    assert link.uid == "job-0-0a0b0c0d"
    # A keeper that takes long to end is reported as disconnected before that.
    seen = [event for _, event in node.events if event != ("closed", True)]
    assert [event[0] for event in seen] == ["connected", "exited", "closed"]


async def test_keeper_gives_up_if_no_daemon_answers(node: Node) -> None:
    await node.stop()
    keeper = await node.launch("true", wait_s=0.3)
    _, errors = await keeper.communicate()
    assert keeper.returncode == 125
    lines = errors.decode().splitlines()
    assert len(lines) == 2, lines
    assert "waiting for snapshotd" in lines[0]
    assert "systemctl start snapshotd" in lines[1]


async def test_keeper_finds_a_daemon_that_starts_later(node: Node) -> None:
    await node.stop()
    keeper = await node.launch("echo", "there")
    assert keeper.stderr is not None
    assert b"waiting for snapshotd" in await keeper.stderr.readline()
    await node.start()
    assert (await keeper.communicate())[0] == b"there\n"


async def test_large_streams_are_complete_across_a_daemon_restart(node: Node) -> None:
    data = random.Random(1).randbytes(12 << 20)
    keeper = await node.launch("cat")
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    await node.reported("connected")
    reading = asyncio.create_task(keeper.stdout.read())
    keeper.stdin.write(data[: 5 << 20])
    await keeper.stdin.drain()
    await node.stop()
    keeper.stdin.write(data[5 << 20 : 9 << 20])
    await keeper.stdin.drain()  # data flows without a daemon
    await node.start()
    await node.reported("connected", count=2)
    keeper.stdin.write(data[9 << 20 :])
    keeper.stdin.close()
    assert await reading == data
    assert await keeper.wait() == 0
    first, second = node.hellos
    assert (first[0].uid, second[0].uid) == ("", "job-0-0a0b0c0d")
    assert first[2] == second[2]


async def test_one_file_for_stdout_and_stderr_keeps_their_order(node: Node) -> None:
    program = "import os\nfor i in range(2000): os.write(1 + i % 2, b'%d\\n' % i)"
    keeper = await node.launch(*python(program), stderr=asyncio.subprocess.STDOUT)
    output, _ = await keeper.communicate()
    assert output.split() == [b"%d" % index for index in range(2000)]


async def test_separate_stdout_and_stderr_stay_separate(node: Node) -> None:
    keeper = await node.launch("sh", "-c", "echo out; echo err >&2")
    assert await keeper.communicate() == (b"out\n", b"err\n")


async def test_rank_has_only_three_descriptors(node: Node) -> None:
    program = "import os\nprint(*[os.readlink(f'/proc/self/fd/{n}') for n in sorted(os.listdir('/proc/self/fd'))[:-1]])"
    keeper = await node.launch(*python(program), stdin=asyncio.subprocess.DEVNULL, stderr=None)
    output, _ = await keeper.communicate()
    null, *pipes = output.decode().split()
    assert null == "/dev/null"
    assert [pipe[:5] for pipe in pipes[:1]] == ["pipe:"]
    assert len(pipes) == 2


async def test_rank_inherits_the_launchers_process_attributes(node: Node, tmp_path: Path) -> None:
    program = (
        "import os, resource, signal\n"
        "print(os.getcwd(), oct(os.umask(0)), os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0],\n"
        "      os.environ['MARK'], os.getsid(0) == os.getpid(), sorted(map(int, signal.pthread_sigmask(0, []))),\n"
        "      signal.getsignal(signal.SIGHUP).name, open('/proc/self/status').read().split('SigIgn:')[1].split()[0])"
    )

    def prepare() -> None:
        import resource

        os.umask(0o027)
        os.nice(3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (345, 4096))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    plain = await asyncio.create_subprocess_exec(
        *python(program),
        stdout=asyncio.subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "MARK": "x"},
        preexec_fn=prepare,
        start_new_session=True,
    )
    expected, _ = await plain.communicate()
    keeper = await node.launch(*python(program), cwd=tmp_path, env={"MARK": "x"}, preexec_fn=prepare)
    output, errors = await keeper.communicate()
    assert output == expected, errors
    assert b"345 x True" in output


async def test_signals_reach_the_rank_and_nohup_is_respected(node: Node) -> None:
    program = (
        "import signal, sys\n"
        "wanted = {signal.SIGUSR1, signal.SIGWINCH, signal.SIGRTMIN, signal.SIGTERM}\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, wanted)\n"
        "print('ready', flush=True)\n"
        "print(sorted(int(signal.sigwait(wanted)) for _ in wanted))"
    )
    keeper = await node.launch(*python(program), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert keeper.stdout is not None
    assert await keeper.stdout.readline() == b"ready\n"
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH, signal.SIGRTMIN, signal.SIGTERM):
        keeper.send_signal(number)
    output, _ = await keeper.communicate()
    expected = sorted(map(int, (signal.SIGUSR1, signal.SIGWINCH, signal.SIGRTMIN, signal.SIGTERM)))
    assert output.decode().strip() == str(expected)
    assert keeper.returncode == 0


async def test_an_interrupt_reaches_the_ranks_children_too(node: Node) -> None:
    program = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "child = os.fork()\n"
        "if child: os.write(1, b'ready\\n')\n"
        "signal.sigwait([signal.SIGINT])\n"
        "os.write(1, b'parent\\n' if child else b'child\\n')"
    )
    keeper = await node.launch(*python(program))
    assert keeper.stdout is not None
    assert await keeper.stdout.readline() == b"ready\n"
    keeper.send_signal(signal.SIGINT)
    assert set((await keeper.stdout.read()).split()) == {b"child", b"parent"}


async def test_rank_gets_an_error_when_its_reader_goes_away(node: Node) -> None:
    reading, writing = os.pipe()
    keeper = await node.launch("yes", stdout=writing)
    os.close(writing)
    assert await asyncio.to_thread(os.read, reading, 4) == b"y\ny\n"
    os.close(reading)
    assert await keeper.wait() == -signal.SIGPIPE


async def test_slow_reader_blocks_the_rank_and_loses_no_output(node: Node) -> None:
    total = 6 << 20
    program = (
        f"import os\nleft = {total}\nwhile left: left -= os.write(1, b'z' * min(left, 65536))\nos.write(2, b'done')"
    )
    reading, writing = os.pipe()
    keeper = await node.launch(*python(program), stdout=writing)
    os.close(writing)
    assert keeper.stderr is not None
    rank = await _rank(node)

    def written_bytes() -> int:
        return int(Path(f"/proc/{rank.pid}/io").read_text().split("wchar: ")[1].split()[0])

    # The rank fills the pipe to the keeper, the keeper's buffer and the pipe to this test, and then blocks.
    await until(lambda: written_bytes() > 1 << 20)
    assert written_bytes() < 3 << 20
    with os.fdopen(reading, "rb") as stream:
        assert len(await asyncio.to_thread(stream.read)) == total
    assert await keeper.stderr.read() == b"done"


async def test_rank_ends_when_its_keeper_is_killed(node: Node) -> None:
    keeper = await node.launch("sleep", "1000")
    rank = await _rank(node)
    await until(lambda: Path(f"/proc/{rank.pid}/comm").read_text() == "sleep\n")
    keeper.kill()
    await keeper.wait()
    await until(lambda: not rank.alive())
    await node.reported("closed", False)


async def test_background_process_does_not_delay_the_launcher(node: Node) -> None:
    keeper = await node.launch("sh", "-c", "sleep 1000 & echo $!")
    output, _ = await keeper.communicate()
    assert keeper.returncode == 0
    os.kill(int(output), signal.SIGKILL)


async def test_another_user_may_start_ranks(node: Node, open_folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    # The checkout may lie where other users cannot read it, below /root for example.
    installed = readable_copy(open_folder / "installed")
    keeper = await node.launch(
        *("sh", "-c", "id -u; cat; echo again > /dev/stdout"),
        wrap=NOBODY,
        interpreter=readable_python(),
        env={"PYTHONPATH": str(installed)},
        cwd=open_folder,
    )
    output, errors = await keeper.communicate(b"text\n")
    assert (output, errors) == (b"65534\ntext\nagain\n", b"")
    hello, _, rank = node.hellos[0]
    assert hello.user_id == 65534
    assert rank is not None


async def test_a_process_of_another_user_cannot_be_registered(node: Node) -> None:
    reader, writer = await asyncio.open_unix_connection(node.socket)
    from shim.keeper.frames import decode, encode

    hello = {"role": "home", "job": "job", "rank": 0, "pid": os.getppid(), "relay_key": "0" * 32}
    writer.write(encode("hello", hello))
    answer = decode(await reader.read())
    assert answer.type == "refused"
    assert node.hellos == []
    writer.close()
    await writer.wait_closed()


async def _rank(node: Node) -> Process:
    await node.reported("connected")
    rank = node.hellos[-1][2]
    assert rank is not None
    return rank
