"""The keys of relays: which node may relay for a rank to its home keeper.

Invariant: the home node accepts one key of each rank, that of the node which has the rank. A node that gets a rank knows from
the image the key of the node before, makes one of its own, and presents both: the home node records the new one, then
answers, and from then on refuses the old one. An undone move leaves a key on its target, so the source replaces its own.

Each key is recorded with the rank's entry before it is used. A node presents the former keys until the home node has
answered, and its own one always. So a daemon may end at any point: whichever of the two keys the home node has recorded,
the node presents it. A rank that moves on while its home node is unreachable takes the former keys along.

With its key, a node also names the coordinator that may end its copy. The home node accepts that name from no other node: a
node that can end a copy can come back with a key made from the record that ended it (`after_end`). Such a key is accepted
once.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping, Sequence

from snapshotd.keepers.ranks import RankEntry

KEY = re.compile(r"[0-9a-f]{32,128}")
#: Keys that are presented at most: they fit into one value of a call's metadata. With more, the newest one is kept in use.
MAX_FORMER = 6


def to_hand_over(entry: RankEntry) -> list[str]:
    """For the image: the keys of which the home node expects one, the newest first."""
    if entry.role == "home":
        return [entry.holder_key or entry.relay_key]
    return [entry.own_key, *entry.former_keys] if entry.own_key else [entry.relay_key]


def take_over(entry: RankEntry, handed: Sequence[str]) -> None:
    """Gives a new guest its own key. `handed` is what another node sent; what is no key is dropped."""
    entry.former_keys = [key for key in handed if KEY.fullmatch(key)][: MAX_FORMER + 1]
    entry.own_key = secrets.token_hex(16)
    if len(entry.former_keys) > MAX_FORMER:
        entry.own_key = entry.former_keys.pop(0)


def replace(entry: RankEntry) -> None:
    """A move of this rank from here was undone: its target has the key, which must become worthless there."""
    if entry.role == "home":
        entry.holder_key = secrets.token_hex(16)
    else:
        take_over(entry, to_hand_over(entry))


def after_end(relay_key: str, record: str) -> str:
    """The key with which a rank comes back from an image after its copy was ended by this record: the home node may have seen
    newer ones than the image has. Only nodes that have had the rank, or its image, can make it."""
    return hmac.digest(relay_key.encode(), f"after {record}".encode(), "sha256").hex()[:32]


def presented(entry: RankEntry) -> dict[str, str]:
    """The metadata of a relay."""
    if not entry.own_key:  # restored by a daemon that did not replace keys
        return {"rank-uid": entry.uid, "relay-key": entry.relay_key}
    return {
        "rank-uid": entry.uid,
        "relay-key": " ".join(entry.former_keys),
        "relay-next": entry.own_key,
        "coordinator": entry.coordinator_node,
    }


def check(entry: RankEntry, metadata: Mapping[str, str]) -> str | None:
    """On the home node: None if the caller has no valid key, else the key that is valid from now on."""
    expected = entry.holder_key or entry.relay_key
    own = metadata.get("relay-next", "")
    former = metadata.get("relay-key", "").split(" ")
    if entry.ended_by:  # nothing of the copy that was ended counts any more, not even that it has ended
        return own if comes_back(entry, metadata) else None
    if _same(own, expected):
        return own
    if any(_same(key, expected) for key in former):
        return own if KEY.fullmatch(own) else expected
    return None


def comes_back(entry: RankEntry, metadata: Mapping[str, str]) -> bool:
    """On the home node: whether the caller has restored the rank after its copy was ended (`after_end`)."""
    if not entry.ended_by or not KEY.fullmatch(metadata.get("relay-next", "")):
        return False
    again = after_end(entry.relay_key, entry.ended_by)
    return any(_same(key, again) for key in metadata.get("relay-key", "").split(" "))


def come_back(image_key: str, image_keys: Sequence[str], ended: str) -> list[str]:
    """For a copy from an older image: the keys of which the home node may expect one. `ended`: the records that have ended
    copies since; the home node knows the last one that it could be told."""
    made = [after_end(image_key, record) for record in reversed(ended.split())]
    return [*made, *(image_keys or [image_key])][:MAX_FORMER]


def _same(key: str, expected: str) -> bool:
    return bool(expected) and hmac.compare_digest(key.encode(), expected.encode())
