"""The kernel's packet rules (nftables), through libnftables: the `nft` program need not be installed.

Invariant: a call is one transaction of the kernel, which applies all of its commands or none. The rules are those of the
calling thread's network namespace. Only tables whose name begins with PREFIX are ever changed. They are in the kernel and
depend on no process.

CRIU's private folder has a copy of the library too, but that one needs its own, newer C library: a process that was started
with the system's cannot load it (tried). So the system's library is used, or the one that $SNAPSHOT_NFTABLES names, built
for the system's C library, with its dependencies beside it (integration/gpu/bundle has such a folder).
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
from collections.abc import Iterable
from ctypes import c_char_p, c_int, c_uint, c_void_p
from typing import Any

from snapshotd.api.errors import Internal, Refused

LIBRARY = os.environ.get("SNAPSHOT_NFTABLES") or "libnftables.so.1"
PREFIX = "snapshotd-"

# enum { NFT_CTX_OUTPUT_… } of <nftables/libnftables.h>
_OUTPUT_JSON = 1 << 4
_OUTPUT_NUMERIC_ALL = 0b1111 << 6  # protocols, priorities, symbols, times as numbers

# The kernel's answers, known only as text, to an expression or chain type that it was built without.
_UNKNOWN_TO_KERNEL = ("Operation not supported", "Protocol not supported", "Protocol wrong type", "Protocol driver")
_NO_SUCH = "No such file or directory"

# The library keeps tables of names in globals. A call takes a millisecond, so one at a time costs nothing.
_one_at_a_time = threading.Lock()


class NotSupported(Refused):
    """This machine lacks something that keeping connections needs. On the wire it is a plain `Refused`."""

    remedy = (
        "boot a kernel with nf_tables, and nf_nat where listeners are to move (CONFIG_NF_TABLES_INET, CONFIG_NFT_NAT,"
        " CONFIG_NFT_REJECT)"
    )


class NftFailed(Internal):
    """The kernel refused a transaction and applied nothing of it. The message quotes libnftables."""


_PROTOTYPES: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    # struct nft_ctx *nft_ctx_new(uint32_t flags);
    ("nft_ctx_new", c_void_p, (c_uint,)),
    # void nft_ctx_free(struct nft_ctx *ctx);
    ("nft_ctx_free", None, (c_void_p,)),
    # void nft_ctx_output_set_flags(struct nft_ctx *ctx, unsigned int flags);
    ("nft_ctx_output_set_flags", None, (c_void_p, c_uint)),
    # int nft_ctx_buffer_output(struct nft_ctx *ctx);
    ("nft_ctx_buffer_output", c_int, (c_void_p,)),
    # int nft_ctx_buffer_error(struct nft_ctx *ctx);
    ("nft_ctx_buffer_error", c_int, (c_void_p,)),
    # const char *nft_ctx_get_output_buffer(struct nft_ctx *ctx);
    ("nft_ctx_get_output_buffer", c_char_p, (c_void_p,)),
    # const char *nft_ctx_get_error_buffer(struct nft_ctx *ctx);
    ("nft_ctx_get_error_buffer", c_char_p, (c_void_p,)),
    # int nft_run_cmd_from_buffer(struct nft_ctx *nft, const char *buf);
    ("nft_run_cmd_from_buffer", c_int, (c_void_p, c_char_p)),
)


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY, use_errno=True)
        for name, result, arguments in _PROTOTYPES:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NotSupported(
            f"packets cannot be filtered on this node: {error}",
            remedy=f"install {LIBRARY} (Debian: libnftables1) on every node",
        ) from error
    return library


def apply(commands: str) -> None:
    """Applies `commands` (the language of `nft -f`) as one transaction, or raises and changes nothing."""
    _call(commands, 0)


def apply_where_there(commands: str) -> bool:
    """`apply`; False, with nothing changed, if the table that the commands name does not exist."""
    try:
        apply(commands)
    except NftFailed as error:
        if _NO_SUCH in error.message:
            return False
        raise
    return True


def probe(commands: str) -> None:
    """`apply` for commands that fail only on a kernel that lacks something: NotSupported then, whatever its answer."""
    try:
        apply(commands)
    except NftFailed as error:  # for an unknown expression or chain type the kernel answers "no such file"
        raise NotSupported(
            f"this kernel lacks what is needed to keep the connections of a rank: {error.message}"
        ) from error


def ask(command: str) -> list[dict[str, Any]]:
    """The objects that a `list …` command names, as nftables writes them in JSON (libnftables-json(5))."""
    answer = _call(command, _OUTPUT_JSON | _OUTPUT_NUMERIC_ALL)
    objects: list[dict[str, Any]] = json.loads(answer)["nftables"] if answer else []
    return [found for found in objects if "metainfo" not in found]


def _call(commands: str, flags: int) -> str:
    library = _library()
    with _one_at_a_time:
        context = library.nft_ctx_new(0)
        if not context:
            raise NotSupported("libnftables cannot reach the kernel's packet filter (NETLINK_NETFILTER); is this root?")
        try:
            library.nft_ctx_output_set_flags(context, flags)
            library.nft_ctx_buffer_output(context)
            library.nft_ctx_buffer_error(context)
            failed = library.nft_run_cmd_from_buffer(context, commands.encode())
            output: bytes = library.nft_ctx_get_output_buffer(context) or b""
            complaint: bytes = library.nft_ctx_get_error_buffer(context) or b""
        finally:
            library.nft_ctx_free(context)
    if failed:
        raise _translated(complaint.decode(errors="replace"))
    return output.decode()


def _translated(complaint: str) -> NftFailed | NotSupported:
    """libnftables reports errors as text only: a line for the error, then the command with marks below it."""
    first = complaint.strip().partition("\n")[0] or "no reason given"
    if any(answer in first for answer in _UNKNOWN_TO_KERNEL):
        return NotSupported(f"this kernel lacks what is needed to keep the connections of a rank: {first}")
    return NftFailed(f"the kernel refused packet rules: {complaint.strip()[:600] or first}")


# ---------------------------------------------------------------- tables of this product


def tables() -> list[str]:
    """The names of all tables `inet snapshotd-…` of this namespace, without the prefix."""
    names = (found["table"]["name"] for found in ask("list tables inet") if "table" in found)
    return sorted(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))


def drop_table(name: str) -> bool:
    """Removes a table with its content; False if there is none."""
    return apply_where_there(f"delete table inet {PREFIX}{name}")


def elements(table: str, name: str, kind: str = "set") -> list[Any]:
    """The elements of a set or map, each as in JSON; none if there is no such table."""
    try:
        found = ask(f"list {kind} inet {PREFIX}{table} {name}")
    except NftFailed as error:
        if _NO_SUCH in error.message:
            return []
        raise
    return [element for entry in found for element in entry.get(kind, {}).get("elem", [])]


def braces(items: Iterable[str]) -> str:
    return "{ " + ", ".join(items) + " }"
