"""Restores a rank, stopped: starts a guest keeper in a new pid namespace, with criu and then the rank as its children.

Invariant: when `run` returns, every process of the copy is stopped and its cgroup frozen. When it raises, `sweep` removes
every process, cgroup and image of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Sequence
from pathlib import Path

from snapshotd import preflight
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import CriuFailed, Where
from snapshotd.criu import images, layers, links, placed, session, verify
from snapshotd.criu.pagemap_image import Pagemaps
from snapshotd.criu.placed import PlacedPages
from snapshotd.cuda.driver import Pair
from snapshotd.files.as_user import User, file_user
from snapshotd.keepers.link import KeeperLink
from snapshotd.keepers.ranks import cgroup_for_guest
from snapshotd.moves import affinity, closed_manifest, tree_facts
from snapshotd.moves.carry import Made
from snapshotd.moves.closed_manifest import Placed
from snapshotd.moves.description import ImageDescription
from snapshotd.moves.device import memory, refill
from snapshotd.moves.device.fills import Fills
from snapshotd.moves.device.parts import Parts
from snapshotd.moves.device.takeover import TakeOver
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.peers import connections, socket_options
from snapshotd.moves.record import Begin, Fields
from snapshotd.moves.record_parts import ClusterNode, JournalledProcess, NcclProcess
from snapshotd.moves.rules import Mark
from snapshotd.moves.target import arrived_image, changed_files, comparison, guest_entry, guest_keeper
from snapshotd.moves.target.changed_files import Settled
from snapshotd.moves.target.limits import set_limits
from snapshotd.moves.target.placing import Placing
from snapshotd.moves.target.waiting_keepers import WaitingKeeper
from snapshotd.moves.tree_facts import TreeFacts
from snapshotd.proc import gpu_cpus, oom_score, tree
from snapshotd.proc.cgroup import Cgroup
from snapshotd.runtime.blocking import in_thread
from snapshotd.runtime.faults import Point, reach
from snapshotd.runtime.spans import span
from snapshotd.transport.device.incoming import Incoming

log = logging.getLogger(__name__)

#: Time limit of a restore, because one that hangs keeps the job paused: a fixed part, and a part for every GiB of image.
RESTORE_S, RESTORE_GIB_S = 60.0, 10.0
STOP_S = 10.0


class Restore:
    """The restore of one sealed image."""

    def __init__(self, node: Node, move_log: MoveLog) -> None:
        self.node, self.log = node, move_log
        self.link: asyncio.Future[KeeperLink] = asyncio.get_running_loop().create_future()
        self.files = Settled()  # after a rollback

    async def run(
        self, parts: Parts, incoming: Incoming | None = None, fills: Fills | TakeOver | None = None
    ) -> Fields:
        """Restores; returns what is journalled about the held copy. `parts` collects timings, `incoming` receives offloaded
        device memory, which `fills` puts onto the GPU."""
        folder = self.node.store.path(self.log.move)
        if arrived_image.must_be_signed(self.log):
            await parts.time("check", arrived_image.must_be_as_made(folder, self.log))
        image = await arrived_image.read_description(folder)
        arrived_image.must_be_of_rank(self.log, image)
        arrived_image.must_have_connections(self.log, image)
        with span("verify image"):
            described = await in_thread(self._verify, folder, image)
        if image.by_device_channel and incoming is None and fills is None:
            await in_thread(refill.must_be_here, folder, image.offloaded)
        if (
            self.log.record.tethered and self.log.record.ended_before
        ):  # what was written since the snapshot is written again
            with span("put files back"):
                self.files = await in_thread(changed_files.put_back, self.node, self.log, folder, image, described)
            await reach(Point.FILES_PUT_BACK)
        with span("place files"):
            below = await self._place_and_mend(folder, image)
        placing = asyncio.create_task(in_thread(self._place_closed, folder, image))  # criu needs none of these files
        try:
            held = await self._restore(folder, image, described, below, parts, incoming, fills)
            await placing
        finally:
            await asyncio.gather(placing, return_exceptions=True)
        return held

    async def _restore(
        self,
        folder: Path,
        image: ImageDescription,
        described: TreeFacts,
        below: Sequence[PlacedPages],
        parts: Parts,
        incoming: Incoming | None,
        fills: Fills | TakeOver | None,
    ) -> Fields:
        begin = self.log.begin
        user = next(one.credentials for one in described.processes if one.pid == image.root)
        rewires, nodes = self._connections(image)
        await in_thread(self.log.mark, Mark.RESTORING, filtered=bool(rewires))
        with span("filter"):
            await in_thread(connections.hold, begin.move, rewires, on_target=True)
        meeting = asyncio.create_task(in_thread(connections.meet, rewires, nodes))
        with span("rewrite sockets"):
            rewritten = await in_thread(connections.rewrite, folder, rewires)
        group = cgroup_for_guest(begin.rank_uid, begin.move)
        entry = guest_entry.of(self.log, image, group, rewires, nodes)
        # Before there is a keeper: one whose move is not registered is not wanted, and ends.
        self.node.ranks.put(entry)
        with span("start keeper"):
            link, keeper = await guest_keeper.start(
                *(self.node, begin, image, group, user, self.link),
                self.log.record.ended_before,
                self.log.record.replayed_output,
            )
        try:
            entry.keeper_pid, entry.keeper_start_ticks = link.keeper.pid, link.keeper.start_ticks
            self.node.ranks.put(entry)
            root_pid = await self._fill(folder, below, link, keeper, group, parts)
        finally:
            await in_thread(self.node.store.withdraw, begin.move)  # what the copy needs, it has
        root = await in_thread(tree.find_child, link.keeper.pid, root_pid, STOP_S)
        with span("compare"):
            await in_thread(self._compare, group.pids(), image, described)
        with span("finish connections"):
            await in_thread(connections.finish, group.pids(), rewritten, image.socket_options.reset)
            await in_thread(socket_options.use_full_segments, group.pids())
            await meeting
        processes = _processes(group.pids(), image.cuda_pids)
        known = self.log.record
        pairs = [] if known.gpus_by_index else [Pair(old, new) for old, new in known.gpu_pairs]
        beside, fills = (incoming, fills) if image.by_device_channel else (None, None)
        inner = dict(zip(image.cuda_pids, processes, strict=True))
        with span("device memory"):
            await memory.revive(
                self.node.gpus,
                processes,
                group,
                pairs,
                image.checkpoint_bytes,
                parts,
                lambda: refill.on_target(inner, image.offloaded, folder, beside, parts, fills),
            )
        in_nccl = _processes(group.pids(), [pid for pid, _ in image.nccl_instances])
        nccl = [
            NcclProcess(process.pid, process.start_ticks, number)
            for process, (_, number) in zip(in_nccl, image.nccl_instances, strict=True)
        ]
        with span("tell keeper"):
            await link.restored(root_pid)
        with span("bind and limit"):
            await in_thread(self._bind, group.pids(), image)
            await in_thread(set_limits, group, image.limits)
        entry.pid, entry.start_ticks, entry.link = root.pid, root.start_ticks, link
        self.node.ranks.put(entry)
        return Fields(
            pid=root.pid,
            start_ticks=root.start_ticks,
            cgroup=entry.cgroup,
            stopped_before=image.stopped_before,
            socket_options=image.socket_options,
            cuda_processes=[JournalledProcess.of(process) for process in processes],
            nccl_processes=nccl,
            keeper_role="guest",
        )

    async def _fill(
        self,
        folder: Path,
        below: Sequence[PlacedPages],
        link: KeeperLink,
        keeper: WaitingKeeper,
        group: Cgroup,
        parts: Parts,
    ) -> int:
        """Has criu restore the tree, and places what it leaves out; the pid of the rank in its own namespace."""
        inherit = [(item.key, item.fd) for item in link.info.inherit]
        # A snapshot that is here shares them (jobs/sending.py), and stays.
        keeps_pages = await in_thread(layers.is_shared, folder)
        image_bytes = await in_thread(_image_bytes, folder, {one.file for one in below})
        placing = Placing(folder, below, keeps_pages=keeps_pages)
        async with placing.ready():
            try:
                asking = session.ask(
                    keeper.ours,
                    session.restore_request(folder, inherit, keeps_pages=keeps_pages),
                    log_path=folder / "restore.log",
                    timeout_s=RESTORE_S + RESTORE_GIB_S * image_bytes / 2**30,
                    where=Where.SOURCE_FROZEN,
                    on_notify=_on_notify,
                )
                answer = await parts.time("criu-restore", asking, image_bytes)
            finally:
                keeper.ours.close()
                with span("end criu"):
                    await in_thread(keeper.wait)
            with span("hold"):
                await in_thread(_hold, group)
                await in_thread(oom_score.spare_no_user, group.pids())
            if below:
                await parts.time("place-memory", placing.run(lambda: _by_inner_pid(group)), placing.bytes)
        return int(answer.restore.pid)

    def _connections(self, image: ImageDescription) -> tuple[list[pb.Rewire], list[ClusterNode]]:
        """The rewirings, and the nodes of the cluster. Those of a job that is resumed were planned in Prepare: when the image
        was made, the targets were not known."""
        if self.log.begin.coordinator:
            return self.log.record.rewires, self.log.record.nodes
        return image.rewires, image.nodes

    async def _place_and_mend(self, folder: Path, image: ImageDescription) -> list[PlacedPages]:
        """Places carried files and corrects criu's images; returns the pages that are placed after criu. At the same time,
        because the child that places takes a moment to start."""
        ghosts: list[links.Ghost] = []
        user = file_user(image.identity, image.user_id)

        def journal(made: list[Made]) -> None:
            self.log.mark(Mark.RESTORING, made=made, rank_user=user)

        order = (folder, image.carried, user, journal, self.files.left)
        placing = asyncio.create_task(in_thread(self.node.carry.place, *order))
        try:
            await in_thread(images.mend, folder, image.other_names)
            await in_thread(images.set_sizes, folder, self.files.sizes)
            await in_thread(images.mend_threads, folder)
            pagemaps = Pagemaps(folder)
            below, left = await in_thread(placed.take, pagemaps, image.below)
            await in_thread(layers.build, pagemaps, left)
            ghosts = await in_thread(_free_ghosts, folder)
            modes = await placing
        finally:
            await asyncio.gather(placing, return_exceptions=True)
            await in_thread(self.log.mark, Mark.RESTORING, ghosts=ghosts)
        await in_thread(images.set_modes, folder, modes)
        return below

    def _place_closed(self, folder: Path, image: ImageDescription) -> None:
        user = file_user(image.identity, image.user_id)

        def journal(placed: Placed) -> None:
            closed_manifest.save(self.log.folder / closed_manifest.FILE, placed)
            self.log.mark(Mark.RESTORING, rank_user=user)

        self.node.carry.closed.place(folder, user, journal, self.log.record.made)

    def _bind(self, pids: list[int], image: ImageDescription) -> None:
        gpus = [new for old, new in self.log.record.gpu_pairs if old in image.gpus]
        affinity.restore(pids, image.affinity, set(image.cpus), set(image.gpu_cpus), gpu_cpus.near(gpus))

    def _verify(self, folder: Path, image: ImageDescription) -> TreeFacts:
        """What the source described. Raises Refused unless the image contains that alone and this node's policy allows it."""
        if image.tree is None:
            raise verify.refuse(
                "image-content",
                "the source did not describe the rank's processes and files",
                "install the same version of snapshotd on both nodes",
            )
        shown, allow_root = self.log.record.user_ids, self.node.config.allow_root_ranks
        described = {one.pid: (one.credentials, one.thread_credentials) for one in image.tree.processes}
        for own, others in described.values():
            for who in (own, *others.values()):
                verify.must_be_allowed(who, shown, allow_root=allow_root)
        if image.root not in described:
            raise verify.refuse("image-content", f"the source did not describe process {image.root}, the rank itself")
        verify.must_match(folder, described, image.tree.paths(), image.below)
        facts = pb.RankFacts(
            files=image.new_files, identity=image.identity.to_proto(), rank=pb.Rank(user_id=image.user_id)
        )
        compared = preflight.compare_files("new-files", facts)
        for check in preflight.refusals([compared]):
            raise verify.refuse(check.name, check.reason, check.remedy)
        return image.tree

    def _compare(self, pids: list[int], image: ImageDescription, described: TreeFacts) -> None:
        """Raises Refused unless the restored copy has exactly what the source described, and its user may have it here."""
        copy = tree_facts.gather(pids)
        found = comparison.differences(
            described,
            copy,
            other_names=image.other_names,
            carry_paths=self.node.config.carry_paths,
            changed=self.files.sizes,
        )
        if found:
            raise verify.refuse(
                "restored-files",
                f"the restored copy differs from the rank: {'; '.join(found[:5])}",
                "a file of the rank was replaced on the target during the restore, or differs there; make both nodes equal"
                " and retry",
            )
        if beyond := comparison.beyond_rights(copy):
            raise verify.refuse(
                "file-rights",
                f"the rank's user may not have these files on this node: {'; '.join(beyond[:5])}",
                "give the user the same rights on both nodes, or have the job close the file",
            )

    @staticmethod
    async def sweep(node: Node, move_log: MoveLog) -> None:
        """Removes all of a copy here: the keeper and its pid namespace, the cgroup, the images, the entry."""
        if move_log.last_mark is Mark.ACTIVATED:
            raise AssertionError("an activated copy is the rank")
        begin = move_log.begin
        entry = node.ranks.get(begin.rank_uid, "guest")
        group = cgroup_for_guest(begin.rank_uid, begin.move)
        await in_thread(connections.silence, group.pids())
        if entry is not None and entry.cgroup == str(group.path):
            if entry.keeper_pid:
                entry.keeper.signal(9)
            node.ranks.remove(entry)
        await in_thread(group.kill, STOP_S)
        group.remove()
        await in_thread(connections.let_go, move_log)
        await in_thread(links.sweep_ghosts, move_log.record.ghosts)
        if move_log.record.rank_user is not None:
            user = User(*move_log.record.rank_user)
            if not _shares_files(node, begin):
                await in_thread(node.carry.closed.take_away, closed_manifest.load_placed(move_log.folder), user)
            await in_thread(node.carry.take_away, move_log.record.made, user)
        await in_thread(node.store.drop, begin.move)


def _shares_files(node: Node, begin: Begin) -> bool:
    """Whether another rank of the user is here, or arriving. It may have found files that this move made, instead of making
    them itself."""
    arriving = any(
        other.begin.role == "target"
        and (other.begin.user_id, other.begin.move != begin.move) == (begin.user_id, True)
        and other.last_mark in {Mark.SEALED, Mark.RESTORING, Mark.HELD}
        for other in node.journal.all()
    )
    return arriving or any(
        (entry.user_id, entry.uid != begin.rank_uid, entry.away_node) == (begin.user_id, True, "")
        for entry in node.ranks.all()
    )


def _free_ghosts(folder: Path) -> list[links.Ghost]:
    return links.free(images.ghosts(folder))


def _image_bytes(folder: Path, placed: Container[str]) -> int:
    """Size of the files that criu reads: neither carried files, nor device memory, nor what is placed after it."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.img") if path.name not in placed)


async def _on_notify(script: str, _pid: int) -> None:
    if script == "post-restore":
        await reach(Point.RESTORING)


def _processes(pids: list[int], inner: list[int]) -> list[tree.Process]:
    """The restored processes that have these pids in their own pid namespace."""
    found = {tree.inner_pid(pid): pid for pid in pids}
    missing = [str(number) for number in inner if number not in found]
    if missing:
        raise CriuFailed(f"the restored tree lacks process {', '.join(missing)}", where=Where.SOURCE_FROZEN)
    return [tree.Process.of(found[number]) for number in inner]


def _by_inner_pid(group: Cgroup) -> dict[int, int]:
    return {tree.inner_pid(pid): pid for pid in group.pids()}


def _hold(group: Cgroup) -> None:
    """Waits until criu's stop has reached every process, then freezes as well."""
    deadline = time.monotonic() + STOP_S
    while not all(tree.stopped(pid) for pid in group.pids()):
        if time.monotonic() > deadline:
            raise CriuFailed("the restored processes are not stopped", where=Where.SOURCE_FROZEN)
        time.sleep(0.001)
    group.freeze(STOP_S)
