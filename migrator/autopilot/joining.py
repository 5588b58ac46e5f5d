"""Makes a state folder a copy of what autopilots share through etcd, or a state of its own again. Blocks."""

from __future__ import annotations

from pathlib import Path

from migrator.autopilot import database, membership, shared
from migrator.autopilot.etcd import Etcd, Settings, Unavailable


def join(folder: Path, settings: Settings, *, begin_anew: bool = False) -> None:
    """The caller has the actor's lock. A folder that has joined before does not need an etcd that answers now.

    With `begin_anew` the folder's state becomes the first one of a new history, if etcd has none. Raises BadConfig if
    the state is not the one in etcd.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    etcd, connection = Etcd(settings), database.connect(folder)
    try:
        history = shared.Shared(etcd, database.SCHEMA)
        if begin_anew and etcd.get(history.head_key) is None:
            shared.leave(connection)
        try:
            history.join(connection)
        except Unavailable:
            here = shared.local(connection)
            if here is None or here.position == 0:  # it is not known whether the history has begun
                raise
    finally:
        connection.close()
        etcd.close()
    membership.write(folder, settings)


def leave(folder: Path) -> None:
    """Makes the state of a folder its own."""
    if not (folder / database.FILE).exists():
        return
    connection = database.connect(folder)
    try:
        shared.leave(connection)
    finally:
        connection.close()
    membership.remove(folder)
