"""Makes the folders in which criu finds the pages that an image leaves out (snapshotd/criu/below.py).

criu looks for such a page in the folder `parent` of the images, then in `parent` of that, and so on, always in the pagemap
of the process that it restores. So the first folder has, under the name of each process, the pagemap that lies below its own,
the second the one below that. All are links to files of the image: no page is stored twice.

The image must have been verified (image_content.py). Names are made of numbers alone, so no link leads out of the folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pycriu import images

from snapshotd.api.errors import Damaged, Where
from snapshotd.criu import below, pagemap_image

_PARENT = "parent"


def build(folder: Path, described: Mapping[int, int]) -> int:
    """Makes the folders anew; returns how many there are. `described`: see `below.chain_of`. Blocking. Raises Damaged."""
    shutil.rmtree(folder / _PARENT, ignore_errors=True)
    depth = 0
    try:
        parents = _parents(folder) if described else {}
        for pid in described:
            own, *lower = below.chain_of(pid, parents, described)
            depth = max(depth, len(lower))
            layer = folder
            for name in lower:
                layer /= _PARENT
                layer.mkdir(mode=0o700, exist_ok=True)
                number = pagemap_image.pages_id_of(folder / name)
                _link(folder / name, layer / own)
                _link(folder / below.pages_of(name, number), layer / pagemap_image.pages_name(number))
    except (OSError, ValueError) as error:
        raise Damaged(f"pages that an image leaves out cannot be found: {error}", where=Where.SOURCE_FROZEN) from error
    return depth


def _parents(folder: Path) -> dict[int, int]:
    with (folder / "pstree.img").open("rb") as file:
        return {entry["pid"]: entry["ppid"] for entry in images.load(file)["entries"]}


def _link(file: Path, name: Path) -> None:
    """Raises ValueError if another file has the name already."""
    try:
        os.link(file, name, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samefile(file, name):
            raise ValueError(f"two files would be {name.name}") from None
