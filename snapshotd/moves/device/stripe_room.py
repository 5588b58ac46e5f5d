"""The host memory of a source's stripe files: reserved before they are made, and watched while they are allocated.

Invariant: a file is allocated in steps, each only if there is memory for it. What is reserved and not allocated yet counts as
taken. Files of a snapshot whose image is on a disk are made there, in the room of that image.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from snapshotd.api.errors import Full
from snapshotd.moves.device import stripe_files
from snapshotd.moves.node import Node
from snapshotd.proc.room import FLOOR_BYTES, RESERVE_BYTES, mib
from snapshotd.runtime.blocking import all_at_once, in_thread

#: The files' folder within that of an image on a disk, until they are complete.
ON_DISK = ".stripes"


class StripeRoom:
    """The stripe files of one move."""

    def __init__(self, node: Node, move: str, files: int) -> None:
        """`files`: how many there are; they are allocated at the same time."""
        self._node, self._move, self._files = node, move, files
        self.folder = stripe_files.folder_of(node.config.image_dir, move)
        self._on_disk = False
        self._unallocated_bytes = 0

    def place(self, *, beside_image: bool) -> None:
        """Chooses the place of the files, before they are made: with the image of a snapshot if that is on a disk, or in
        memory. Files that a process of the rank writes itself must be in memory: a disk that fails would kill it."""
        self._on_disk = beside_image and self._node.store.on_disk(self._move)
        if self._on_disk:
            self.folder = self._node.store.path(self._move) / ON_DISK
        else:
            if self.folder.name == ON_DISK:  # what was made there is of no use
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = stripe_files.folder_of(self._node.config.image_dir, self._move)

    def reserve(self, size_bytes: int) -> None:
        """Blocking. Raises Full."""
        node = self._node
        if self._on_disk:
            return  # with the image
        node.store.dropped()  # before the turn: all moves of the machine wait for it
        with node.room.turn():
            room = node.store.room_bytes()
            if room < size_bytes + RESERVE_BYTES:
                raise Full(
                    f"{mib(size_bytes)} and a reserve of {mib(RESERVE_BYTES)} are needed to offload it here, {mib(room)} are"
                    f" free: {node.room.free()}"
                )
            self._unallocated_bytes += size_bytes
            node.room.count(self._purpose, lambda: self._unallocated_bytes)

    def make_folder(self) -> None:
        """An empty one. Blocking."""
        if self._on_disk:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            return
        stripe_files.make_folder(self._node.config.image_dir, self._move)

    async def make_files(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Makes files with these names and bytes, and allocates all of them. Raises Full."""
        size_bytes = sum(size for _, size in wanted)
        if self._on_disk:
            names = [f"{ON_DISK}/{name}" for name, _ in wanted]
            await in_thread(self._node.store.set_aside, self._move, names, size_bytes)
        await in_thread(self.reserve, size_bytes)
        files = [(self.folder / name, size) for name, size in wanted]
        await all_at_once(lambda file: stripe_files.allocate(*file, self._look), files)

    def enlarge(self, names: Sequence[str], before_bytes: int, size_bytes: int) -> None:
        """Enlarges each of these files. Blocking. Raises Full."""
        self.reserve(len(names) * max(0, size_bytes - before_bytes))
        for name in names:
            stripe_files.enlarge(self.folder / name, size_bytes, self._look)

    def remove(self) -> None:
        """Removes the files that are still there: of processes that have ended, or whose memory the driver's checkpoint
        carries. Blocking. Idempotent."""
        if self._on_disk:
            shutil.rmtree(self.folder, ignore_errors=True)  # what is left is removed with the image
        stripe_files.sweep(self._node.config.image_dir, self._move)

    def give_up(self) -> None:
        """Nothing more is allocated. Blocking. Idempotent."""
        self._node.room.give_up(self._purpose)
        self._unallocated_bytes = 0

    def _look(self, step_bytes: int) -> None:
        """Before more of a file is allocated. Blocking. Raises Full if something else has taken the memory meanwhile."""
        if self._on_disk:
            return
        limited_by, left = self._node.room.left()
        at_once_bytes = min(self._unallocated_bytes, step_bytes * self._files)  # the other files take a step as well
        if left < at_once_bytes + FLOOR_BYTES:
            raise Full(
                f"{limited_by} has only {mib(left)} of memory left, and {mib(self._unallocated_bytes)} more are needed to"
                " offload it here"
            )
        self._unallocated_bytes = max(0, self._unallocated_bytes - step_bytes)

    @property
    def _purpose(self) -> str:
        return f"stripes of {self._move}"

    def path(self, name: str) -> Path:
        return self.folder / name
