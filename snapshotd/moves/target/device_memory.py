"""The device memory of a rank that comes: into stripe files, or, where both nodes hold memory, onto the GPU as it arrives."""

from __future__ import annotations

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Full, Where, WrongState
from snapshotd.inprocess.holding import HeldBlock
from snapshotd.moves.device import takeover
from snapshotd.moves.device.fills import Fills
from snapshotd.moves.device.takeover import TakeOver
from snapshotd.moves.journal import MoveLog
from snapshotd.moves.node import Node
from snapshotd.moves.target.device_channels import DeviceChannels
from snapshotd.proc.room import mib
from snapshotd.proc.tree import Process
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.device import ring


async def open_channel(
    node: Node, channels: DeviceChannels, move_log: MoveLog, request: pb.OpenDeviceChannelRequest, caller: str
) -> pb.OpenDeviceChannelReply:
    """Opens the channel of a move. The caller holds the move's lock."""
    plain = request.plain and node.config.device_channel == "plain"
    gpu = dict(move_log.record.gpu_pairs).get(request.gpu, "") if request.slot_bytes else ""
    fills = bool(gpu) and node.config.hold_device_memory
    if fills and await _may_take_over(node, request, gpu):
        await channels.close(request.move)
        holder = Process(request.holder.pid, request.holder.start_ticks)
        await channels.fill(request.move, TakeOver(node, request.move, holder))
        return pb.OpenDeviceChannelReply(sealed=True, takes_over=True)
    if fills and gpu == request.gpu:
        await _must_fit_twice(node, gpu, int(request.expected_bytes))
    folder, size_bytes = node.store.path(request.move), int(request.expected_bytes)
    if fills:
        size_bytes = ring.memory_bytes(len(request.names))
    await in_thread(node.store.set_aside, request.move, request.names, size_bytes, rings=fills)
    incoming = await channels.open(
        request.move,
        folder,
        request.names,
        caller,
        plain=plain,
        expected_bytes=size_bytes,
        ring_bytes=ring.RING_BYTES if fills else 0,
    )
    if fills:
        await channels.fill(
            request.move,
            Fills(node, request.move, gpu, folder, request.names, int(request.slot_bytes), incoming),
        )
    return pb.OpenDeviceChannelReply(
        port=incoming.port, key=incoming.key, plain=plain, sealed=True, endpoints=incoming.endpoints, fills=fills
    )


async def _may_take_over(node: Node, request: pb.OpenDeviceChannelRequest, gpu: str) -> bool:
    """Whether the source is a node of this very machine and the rank stays on its GPU; both nodes must allow it."""
    same = bool(request.machine) and request.machine == node.room.machine and gpu == request.gpu
    if not same or not node.config.hand_over_device_memory:
        return False
    return await in_thread(takeover.reaches, Process(request.holder.pid, request.holder.start_ticks))


async def _must_fit_twice(node: Node, gpu: str, size_bytes: int) -> None:
    """Raises Full if a GPU that both nodes share has no room for a copy of memory that stays on it: the source then takes it
    off the GPU first. The job runs."""
    inventory = await node.gpus.inventory(fresh=True)
    free_bytes = sum(card.memory_free_bytes for card in inventory.gpus if card.uuid == gpu)
    if free_bytes < size_bytes:
        raise Full(
            f"GPU {gpu} of both nodes has {mib(free_bytes)} free, and {mib(size_bytes)} would have to be on it twice",
            remedy="set hold_device_memory and hand_over_device_memory to true on both nodes",
            where=Where.SOURCE_RUNNING,
        )


async def allocate(channels: DeviceChannels, request: pb.AllocateDeviceMemoryRequest) -> pb.AllocateDeviceMemoryReply:
    """The source has handed over the memory of a process: creates the same here, to be filled as it arrives, or takes it
    over."""
    fills = channels.fills(request.move)
    if fills is None:
        raise WrongState("this node fills no device memory for this move", where=Where.SOURCE_FROZEN)
    blocks = [HeldBlock(one.address, one.bytes, one.device) for one in request.blocks]
    await fills.allocate(request.pid, blocks, request.key)
    return pb.AllocateDeviceMemoryReply()
