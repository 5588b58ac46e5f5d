"""Programs that start a command many times, on this node or on others (mpirun, srun): every command that they start becomes
a rank, because `migrator run` is written in front of it.

Invariant: no option is guessed. Where the command begins depends on which options have a value, so a command line with an
option that is not listed here is refused, and the message says how to write it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from migrator.cli.command_words import unwrapped


class NotUnderstood(Exception):
    """It is not known where the command begins. The message names the option."""


class _Options(NamedTuple):
    """The options of a starter, without their dashes, by the number of words that follow them."""

    flags: frozenset[str]
    one: frozenset[str]
    two: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()  # only with `=`, or attached to a letter
    letters: bool = False  # a single dash is followed by letters, as in `-ln4`
    segments: bool = False  # several commands, separated by `:`


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Open MPI, MPICH (Hydra) and Intel MPI. One dash and two mean the same.
_MPI = _Options(
    flags=_names(
        """
        allow-run-as-root oversubscribe nooversubscribe use-hwthread-cpus report-bindings display-map
        display-devel-map display-allocation display-topo tag-output timestamp-output xml
        merge-stderr-to-stdout quiet q v verbose bycore bynode byslot bysocket pernode bind-to-core
        bind-to-socket bind-to-none nolocal noprefix novm do-not-launch do-not-resolve enable-recovery continuous
        report-child-jobs-separately get-stack-traces show-progress forward-signals-none
        leave-session-attached abort-on-non-zero-status preload-binary s debug-daemons d disable-recovery l
        prepend-rank genvall genvnone envall envnone print-all-exitcodes rr
        """
    ),
    one=_names(
        """
        n np c N npernode npersocket num-proc map-by bind-to rank-by H host hostfile machinefile
        default-hostfile add-host add-hostfile x wdir wd prefix path output-filename output output-proctable
        timeout am tune rf rankfile stdin cpu-set cpu-list personality max-restarts display runtime-options
        launch-agent preload-files ppr xterm cpus-per-proc cpus-per-rank slot-list report-uri report-pid
        dvm-uri f hosts ppn perhost grr envlist genvlist launcher launcher-exec bootstrap rmk iface membind
        outfile-pattern errfile-pattern prepend-pattern usize topolib
        """
    ),
    two=_names("mca gmca pmixmca prtemca env genv"),
    segments=True,
)
_SRUN = _Options(
    flags=_names(
        """
        E H l O s u v X Q Z preserve-env hold label overcommit oversubscribe unbuffered verbose
        disable-status quiet no-allocate contiguous exact overlap pty spread-job use-min-nodes reboot whole
        interactive external-launcher quit-on-interrupt test-only
        """
    ),
    one=_names(
        """
        A B b c C d D e F G i J L m M n N o p q r S t T w W x account accel-bind acctg-freq bb bbf bcast-exclude
        begin chdir cluster-constraint clusters comment constraint container container-id core-spec
        cores-per-socket cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
        distribution epilog error exclude export extra extra-node-info gid gpu-bind gpu-freq gpus
        gpus-per-node gpus-per-socket gpus-per-task gres gres-flags het-group hint input job-name jobid
        licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi msg-timeout
        network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
        ntasks-per-socket ntasks-per-tres open-mode output partition power prefer priority profile prolog
        qos relative reservation segment signal slurmd-debug sockets-per-node switches task-epilog
        task-prolog thread-spec threads threads-per-core time time-min tmp tres-bind tres-per-task uid wait
        wckey
        """
    ),
    optional=_names(
        """
        I k K immediate no-kill kill-on-bad-exit exclusive nice propagate resv-ports x11 compress send-libs
        """
    ),
    letters=True,
    segments=True,
)
_STARTERS = {
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "mpiexec.openmpi", "mpiexec.mpich", "orterun"), _MPI),
    **dict.fromkeys(("mpirun.openmpi", "mpirun.mpich", "prterun"), _MPI),
    "srun": _SRUN,
}


def name_of(command: Sequence[str]) -> str:
    """The starter's name if the command is one, else ""."""
    words = unwrapped(command)
    name = os.path.basename(words[0]) if words else ""
    return name if name in _STARTERS else ""


def commands(command: Sequence[str]) -> list[list[str]]:
    """What a starter starts: a command, or several. Raises NotUnderstood."""
    words = list(command)
    return [words[begin:end] for begin, end in _ranges(words)]


def with_prefix(command: Sequence[str], prefix: Sequence[str]) -> list[str]:
    """The starter with `prefix` in front of every command that it starts. Raises NotUnderstood."""
    words = list(command)
    for begin, _ in reversed(_ranges(words)):
        words[begin:begin] = prefix
    return words


def _ranges(words: list[str]) -> list[tuple[int, int]]:
    """Where the commands begin and end."""
    own = unwrapped(words)
    name, options = os.path.basename(own[0]), _STARTERS[os.path.basename(own[0])]
    begin, found = len(words) - len(own) + 1, []
    while True:
        end = next((at for at in range(begin, len(words)) if options.segments and words[at] == ":"), len(words))
        at = begin
        while at < end and words[at].startswith("-") and words[at] != "--":
            at += 1 + _values(name, words[at], options)
        at += at < end and words[at] == "--"
        if at >= end:
            raise NotUnderstood(f"{name} is given no command")
        found.append((at, end))
        if end == len(words):
            return found
        begin = end + 1


def _values(name: str, word: str, options: _Options) -> int:
    """How many words follow an option that belong to it."""
    if options.letters and not word.startswith("--"):
        return _values_of_letters(name, word, options)
    plain, attached, _ = word.lstrip("-").partition("=")
    if plain in options.flags or (plain in options.optional):
        return 0
    if plain in options.one:
        return 0 if attached else 1
    if plain in options.two:
        return 2
    raise NotUnderstood(f"the option {word} of {name} is not known here")


def _values_of_letters(name: str, word: str, options: _Options) -> int:
    for at, letter in enumerate(word[1:], 2):
        if letter in options.one:
            return 0 if word[at:] else 1
        if letter in options.optional:
            return 0  # what follows is its value
        if letter not in options.flags:
            raise NotUnderstood(f"the option -{letter} of {name} is not known here")
    return 0
