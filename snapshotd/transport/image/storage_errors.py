"""What the failure of a file system means for an image that is stored there."""

from __future__ import annotations

import errno

from snapshotd.api.errors import Full, Internal

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_BROKEN = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO)


def translated(error: OSError, doing: str) -> Full | Internal:
    if error.errno in _FULL:
        return Full(f"no space left while {doing}: {error.strerror}")
    if error.errno in _BROKEN:
        return Internal(f"{doing}: {error.strerror}", remedy="check the disk of that node: `dmesg` there says more")
    return Internal(f"{doing}: {error}")
