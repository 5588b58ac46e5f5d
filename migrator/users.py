"""Users by name and number. A job belongs to the user that started it: two users can have jobs of the same name.

Numeric user ids mean the same users on all nodes and on the operator's machine, which may lack some names.
"""

from __future__ import annotations

import pwd


def name_of(user_id: int) -> str:
    """The user's name, or the number if it has none here."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except (KeyError, OverflowError):
        return str(user_id)


def described(user_id: int) -> str:
    """ "alice (1500)"; "1500" if the user has no name here."""
    name = name_of(user_id)
    return name if name == str(user_id) else f"{name} ({user_id})"


def id_of(text: str) -> int:
    """The number of a user that is given by name or number. Raises ValueError."""
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < (1 << 32) - 1:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        raise ValueError(f"{text[:80]!r} is neither a user of this machine nor a user id") from None
