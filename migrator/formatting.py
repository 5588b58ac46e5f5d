"""Formats sizes, rates, durations and untrusted text for people.

Sizes are decimal (1 GB is 10⁹ bytes), so that bytes, seconds and GB/s on one line agree with each other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper as EnumTypeWrapper


def size(count: float) -> str:
    """1 234 567 890 → "1.2 GB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor * 0.9995:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def rate(count: float, seconds: float) -> str:
    """Bytes in seconds as GB/s; empty if either is 0."""
    return f"{count / seconds / 1e9:.2f} GB/s" if count > 0 and seconds > 0 else ""


def seconds(value: float) -> str:
    """A measured time: "0.04 s", "0.9 s", "12.3 s"."""
    return f"{value:.1f} s" if value >= 0.095 else f"{value:.2f} s"


def span(value: float) -> str:
    """A coarse duration: "5 s", "3 min", "2 h 5 min", "4 d 1 h". A negative one, from clocks that differ, is "0 s"."""
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(unix_s: float) -> str:
    """A time as local date and time. A daemon may name any: what no calendar has is shown as a number."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g}"


def name_of(kind: EnumTypeWrapper[Any], value: int) -> str:
    """The name of a value of an enumeration. A daemon may use values that this version does not have."""
    try:
        return kind.Name(value)
    except ValueError:
        return f"UNKNOWN_{value}"


def plain(text: str) -> str:
    """Untrusted text on one line, with control characters replaced, so that it cannot control a terminal."""
    return "".join(sign if sign.isprintable() else ("\N{SYMBOL FOR NEWLINE}" if sign == "\n" else "?") for sign in text)


def plain_lines(text: str) -> list[str]:
    """Like `plain`, for text of several lines."""
    return [plain(line.expandtabs(4)) for line in text.split("\n")] if text else []


def json_line(value: Mapping[str, Any]) -> str:
    """One JSON object on one line, in which every character that can control a terminal is escaped.

    JSON itself requires that for the ASCII control characters only. Bidirectional and C1 control characters, DEL, line
    separators and lone surrogates are escaped too; other text stays readable.
    """
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(sign if sign.isprintable() else _escaped(sign) for sign in text)


def _escaped(sign: str) -> str:
    units = sign.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
