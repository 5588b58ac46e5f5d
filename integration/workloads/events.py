"""Uses epoll over an eventfd, a signalfd, an inotify and a socketpair; a memfd; unread bytes in each."""

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import tempfile

from steps import say, steps, wrong

libc = ctypes.CDLL(None, use_errno=True)
event = os.eventfd(7)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
mask = struct.pack("Q", 1 << (signal.SIGUSR1 - 1))
signals = libc.signalfd(-1, mask, 0)
left, right = socket.socketpair()
left.send(b"unread")
folder = tempfile.mkdtemp(dir=sys.argv[sys.argv.index("--folder") + 1] if "--folder" in sys.argv else None)
watch = libc.inotify_init()
libc.inotify_add_watch(watch, folder.encode(), 0x100)  # IN_CREATE
memory = os.memfd_create("state")
os.write(memory, b"memfd" * 1000)
poll = select.epoll()
for fd in (event, signals, right.fileno(), watch):
    poll.register(fd, select.EPOLLIN)
names = {event: "event", signals: "signal", right.fileno(): "socket", watch: "watch"}
first_inode = os.fstat(memory).st_size
for step in steps():
    os.eventfd_write(event, step)
    if step % 3 == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    if step % 5 == 0:
        open(f"{folder}/{step}", "w").close()
    ready = sorted(names[fd] for fd, _ in poll.poll(0))
    value = os.eventfd_read(event)
    if step % 3 == 0 and struct.unpack_from("I", os.read(signals, 128))[0] != signal.SIGUSR1:
        wrong("signalfd")
    if step % 5 == 0:
        name = os.read(watch, 4096)[16:].rstrip(b"\0").decode()
        if name != str(step):
            wrong(f"inotify said {name}")
        os.unlink(f"{folder}/{step}")
    if os.pread(memory, 5, 5 * (step % 1000)) != b"memfd" or os.fstat(memory).st_size != first_inode:
        wrong("memfd")
    say(step, value, *ready)
if right.recv(100) != b"unread":
    wrong("socketpair")
os.rmdir(folder)
