"""Whether snapshots for which there is no memory can be stored on a disk (`snapshot_spill_dir`)."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotd.config import Config
from snapshotd.proc import mountinfo
from snapshotd.selfcheck.finding import Finding, failed, ok, warning
from snapshotd.transport.image import spill
from snapshotd.transport.image.store import LEFT_FREE_BYTES

CHECK = "snapshot-disk"
_PROBE_BYTES = 1 << 20
_NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "9p", "fuse", "gpfs", "beegfs")


def spilling(config: Config) -> Finding:
    """Writes a file there, without a name. Blocks for as long as the disk does not answer."""
    if not config.snapshot_spill_dir:
        return ok(CHECK, f"none ({spill.KEY} is not set): a snapshot for which there is no memory is refused")
    place = Path(config.snapshot_spill_dir)
    why = spill.problem(place)
    if not why:
        try:
            descriptor = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, bytes(_PROBE_BYTES), 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            why = f"{place} cannot be written to: {error.strerror}"
    if why:
        remedy = f"make it an empty directory of root on a local disk, then restart snapshotd; or unset {spill.KEY}"
        return failed(CHECK, why, remedy)
    room = os.statvfs(place)
    free_bytes = room.f_bavail * room.f_frsize
    text = f"{place}: {room.f_blocks * room.f_frsize / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB of them free"
    mount = mountinfo.mount_of(place)
    if mount is not None and mount.kind.startswith(_NETWORK):
        remedy = "use a local disk: jobs wait for it in each snapshot"
        return warning(CHECK, f"{text}; {mount.kind} is no local disk", remedy)
    if free_bytes < 2 * LEFT_FREE_BYTES:
        return warning(CHECK, text, "free space there: snapshots leave 1 GiB of it free")
    return ok(CHECK, text)
