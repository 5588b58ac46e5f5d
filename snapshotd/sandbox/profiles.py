"""What each kind of child may do. docs/security.md has the same table for readers.

A profile names what is left, a rule what is taken away. Every child that has a filter can neither execute programs nor start
processes, trace, mount, enter namespaces, load code into the kernel or use interfaces that no child needs and in which
privilege escalations were found again and again (bpf, io_uring, userfaultfd, perf, keyrings).
"""

from __future__ import annotations

import errno
import os
import socket
from enum import Enum
from typing import NamedTuple

from snapshotd.sandbox import landlock
from snapshotd.sandbox.filter import Rule, always
from snapshotd.sandbox.privileges import CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE

_CLONE_THREAD = 0x00010000
#: CLONE_NEWTIME has no bit of its own in clone: it is among the bits of the exit signal, and only unshare can use it.
_CLONE_NAMESPACES = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
#: They choose the process that the kernel signals when something happens to a descriptor, and the signal, such as SIGKILL.
_SIGNAL_BY_FCNTL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_SIGNAL_BY_IOCTL = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP
_FLAGS_BY_IOCTL = (0x40086602, 0x40046602, 0x401C5820)  # FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR
#: What Python's own functions for files and sockets use: FIOCLEX, FIONCLEX, FIONBIO, FIONREAD, TCGETS.
_IOCTL_OF_PYTHON = (0x5451, 0x5450, 0x5421, 0x541B, 0x5401)
#: UFFDIO_REGISTER, PAGEMAP_SCAN.
_IOCTL_OF_TRACKING = (0xC020AA00, 0xC0606610)
_PR_SET_PDEATHSIG = 1
_SPECIAL_BITS = 0o7000  # set-user-id, set-group-id, sticky
_MAP_SHARED = 1
#: What a descriptor would be opened with to write, except O_RDWR, which /proc/PID/mem needs.
_OPEN_TO_CHANGE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)

_NO_OWNERS = Rule("fcntl", argument=1, one_of=_SIGNAL_BY_FCNTL)
#: Of every child that has a deny list.
_NEVER = (
    *always("execve execveat fork vfork ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd"),
    *always("mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick"),
    *always("mount_setattr setns unshare bpf perf_event_open userfaultfd keyctl add_key request_key"),
    *always("io_uring_setup io_uring_enter io_uring_register kexec_load kexec_file_load"),
    *always("init_module finit_module delete_module create_module query_module get_kernel_syms"),
    *always("name_to_handle_at open_by_handle_at reboot swapon swapoff personality acct quotactl quotactl_fd"),
    *always("sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime syslog vhangup"),
    *always("uselib ustat _sysctl modify_ldt iopl ioperm fanotify_init migrate_pages move_pages"),
    *always("kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal"),
    # A child that works for a user keeps the ids of `nobody`, and changes nothing of other processes.
    *always("setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups capset"),
    *always("sched_setaffinity sched_setscheduler sched_setparam sched_setattr setpriority ioprio_set"),
    *always("process_madvise process_mrelease"),
    Rule("clone", any_bit=_CLONE_NAMESPACES),
    Rule("clone", without_bit=_CLONE_THREAD),
    Rule("clone3", error=errno.ENOSYS),
    Rule("ioctl", argument=1, one_of=(_TIOCSTI, _TIOCLINUX, *_SIGNAL_BY_IOCTL)),
    _NO_OWNERS,
    Rule("prlimit64", none_of=(0,)),  # only its own limits
    Rule("prctl", one_of=(_PR_SET_PDEATHSIG,)),  # it was set before: the child must not outlive the daemon
)
_NO_NETWORK = always("socket socketpair connect bind listen accept accept4")
_NO_THREADS = always("clone")
#: Changes of what Landlock does not restrict: modes, owners, times, extended attributes, flags.
_NO_ATTRIBUTES_BY_PATH = (
    *always("chmod fchmodat fchmodat2 chown lchown fchownat utime utimes futimesat file_setattr"),
    *always("setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat"),
    Rule("utimensat", argument=1, not_null=True),
    Rule("ioctl", argument=1, one_of=_FLAGS_BY_IOCTL),
)
_NO_ATTRIBUTES = (*_NO_ATTRIBUTES_BY_PATH, *always("fchmod fchown utimensat"))
#: Changes to files that need no descriptor which is open for writing.
_NO_CHANGES = (
    *_NO_ATTRIBUTES,
    *always("creat mkdir mkdirat mknod mknodat link linkat symlink symlinkat unlink unlinkat rmdir"),
    *always("rename renameat renameat2 truncate"),
    Rule("open", argument=1, any_bit=_OPEN_TO_CHANGE),
    Rule("openat", argument=2, any_bit=_OPEN_TO_CHANGE),
)
#: Opening for reading and writing, which /proc/PID/mem needs to be written, would also do for devices.
_NO_WRITING = (Rule("open", argument=1, any_bit=os.O_RDWR), Rule("openat", argument=2, any_bit=os.O_RDWR))
#: Devices can be opened for reading where Landlock does not restrict that. It restricts their ioctl since Linux 6.10 only.
_NO_IOCTL = (Rule("ioctl", argument=1, none_of=_IOCTL_OF_PYTHON),)
#: The mode that openat2 gives a new file is in memory, where a filter cannot see it. But the kernel removes these bits when
#: something is written into the file by a process without CAP_FSETID.
_NO_SPECIAL_FILES = (
    Rule("fchmod", argument=1, any_bit=_SPECIAL_BITS),
    Rule("open", argument=2, any_bit=_SPECIAL_BITS),
    Rule("openat", argument=3, any_bit=_SPECIAL_BITS),
    Rule("creat", argument=1, any_bit=_SPECIAL_BITS),
    Rule("mkdir", argument=1, any_bit=_SPECIAL_BITS),
    Rule("mkdirat", argument=2, any_bit=_SPECIAL_BITS),
    Rule("mknod", argument=1, any_bit=_SPECIAL_BITS),
    Rule("mknodat", argument=2, any_bit=_SPECIAL_BITS),
)
#: Ways to write around the rules for open.
_NO_OTHER_WRITING = (*always("openat2 memfd_create"), Rule("mmap", argument=3, any_bit=_MAP_SHARED))
_ONLY_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
#: For a process that works on bytes in memory and on descriptors that it has or is given.
_ON_DESCRIPTORS = (
    "read write readv writev pread64 preadv lseek close fstat newfstatat dup fcntl poll ppoll"
    " recvmsg recvfrom sendmsg sendto mmap munmap mremap mprotect madvise brk futex"
    " rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall set_robust_list rseq"
    " getrandom clock_gettime clock_nanosleep gettimeofday getrusage sched_yield"
    " getpid gettid getuid geteuid getgid getegid exit exit_group"
)


class _Profile(NamedTuple):
    #: Rules of the filter, and the only system calls that are allowed (None: all others). No filter if both are empty.
    denied: tuple[Rule, ...]
    allowed: tuple[str, ...] | None = None
    #: Which accesses to files Landlock denies outside the paths that the child names; None: no Landlock.
    files: int | None = None
    tcp: bool = False
    capabilities: tuple[int, ...] = ()
    #: Whether regular files can be written at all, also through descriptors that are open.
    writes: bool = True
    #: Whether it has its user's id for files alone, so that the user's processes can neither signal nor limit nor delay it.
    only_files: bool = False
    #: Whether capabilities, user and dumpability are changed: not for the CUDA driver, whose needs are not documented.
    drops: bool = True


class Profile(Enum):
    """The profiles. The name is that of the work, not of a program."""

    #: Speaks with other nodes: sockets and threads. Reads Python's library and the resolver's files.
    NETWORK = _Profile(
        denied=(*_NEVER, *_NO_ATTRIBUTES, Rule("socket", none_of=_ONLY_FAMILIES)),
        files=landlock.READING | landlock.WRITING | landlock.EXECUTE | landlock.IOCTL_DEV,
        tcp=True,
    )
    #: Makes and removes a user's files with that user's rights. Opens nothing but what is below the carry paths, so it can
    #: change attributes, through descriptors, only there: a descriptor for reading suffices for that.
    FILES = _Profile(
        denied=(*_NEVER, *_NO_NETWORK, *_NO_THREADS, *_NO_ATTRIBUTES_BY_PATH, *_NO_SPECIAL_FILES, *_NO_IOCTL),
        files=landlock.READING | landlock.WRITING | landlock.EXECUTE | landlock.IOCTL_DEV,
        only_files=True,
    )
    #: Looks at a user's files with that user's rights: opens for reading what that user can, changes none.
    LOOK = _Profile(
        denied=(*_NEVER, *_NO_NETWORK, *_NO_THREADS, *_NO_CHANGES, *_NO_WRITING, *_NO_IOCTL),
        files=landlock.WRITING | landlock.EXECUTE | landlock.IOCTL_DEV,
        only_files=True,
    )
    #: Reads and writes a rank's memory. No Landlock, which would forbid that. CAP_SYS_PTRACE because of Yama and of processes
    #: that are not dumpable, CAP_CHECKPOINT_RESTORE for /proc/PID/map_files.
    MEMORY = _Profile(
        denied=(*_NEVER, *_NO_NETWORK, *_NO_THREADS, *_NO_CHANGES, *_NO_OTHER_WRITING, *_NO_IOCTL),
        capabilities=(CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE),
        writes=False,
        only_files=True,
    )
    #: The same, but only reads: opens nothing for writing, no device either, though its user be root.
    MEMORY_READING = _Profile(
        denied=(*_NEVER, *_NO_NETWORK, *_NO_THREADS, *_NO_CHANGES, *_NO_OTHER_WRITING, *_NO_IOCTL, *_NO_WRITING),
        capabilities=(CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE),
        writes=False,
        only_files=True,
    )
    #: Parses bytes from another node: only descriptors that it is given.
    PARSER = _Profile(
        denied=(_NO_OWNERS,),
        allowed=tuple(_ON_DESCRIPTORS.split()),
        files=landlock.READING | landlock.WRITING | landlock.EXECUTE | landlock.IOCTL_DEV,
    )
    #: Follows the memory of one process of a rank: only descriptors that it is given, and what they are asked for.
    TRACKER = _Profile(
        denied=(_NO_OWNERS, Rule("ioctl", argument=1, none_of=(*_IOCTL_OF_PYTHON, *_IOCTL_OF_TRACKING))),
        allowed=tuple((_ON_DESCRIPTORS + " ioctl preadv2").split()),
        files=landlock.READING | landlock.WRITING | landlock.EXECUTE | landlock.IOCTL_DEV,
    )
    #: Copies memory of a process into a file, or back: only the two descriptors that it is given.
    COPIER = _Profile(
        denied=(_NO_OWNERS,),
        allowed=tuple((_ON_DESCRIPTORS + " preadv2 pwrite64 fallocate").split()),
        files=landlock.READING | landlock.WRITING | landlock.EXECUTE | landlock.IOCTL_DEV,
    )
    #: Sends or receives a stripe of device memory over connections that it is given; one file.
    STRIPE = _Profile(
        denied=(*_NEVER, *_NO_NETWORK, *_NO_ATTRIBUTES),
        files=landlock.READING | landlock.WRITING | landlock.EXECUTE | landlock.IOCTL_DEV,
    )
    #: Uses the CUDA driver, which loads modules and creates devices through a set-user-id program.
    CUDA = _Profile(denied=(), drops=False)
