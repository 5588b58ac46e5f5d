"""What the node that has made the image of a rank for a snapshot has signed: the digests of all its files.

The list is made when the image is sent to its buddies, and kept with the image and with each copy. At a rollback the target
compares what a buddy has sent with it. So a node that keeps a copy cannot change it, and a disk that has is noticed.

Invariant: the key that has signed belongs to a certificate of the cluster's CA, which the list carries along, because the
node may have another one by now, or be lost. It names the node, and was valid when the list was made. One that was revoked
since does not count. Which node must have signed, and for which snapshot, the list itself does not say: its reader knows it
from the job's coordinator.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig, Unreadable, Where
from snapshotd.api.revocation import revocations_of
from snapshotd.moves import image_seal
from snapshotd.moves.jobs import stored
from snapshotd.moves.journal import MoveLog
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.image.sync import sync_folder

if TYPE_CHECKING:
    from cryptography import x509

FILE = "made.pb"
#: TLS, and the seals of images that are sent, sign nothing that begins like this, although they use the same key.
_PURPOSE = b"snapshotd image of a snapshot, version 1\0"
_MAX_CHAIN = 5
#: The digest of a file is that of the digests of its pieces. Pieces that are holes are not read.
_PIECE_BYTES = 1 << 20
_SPAN_BYTES = 64 << 20
_ZERO_PIECE = hashlib.sha256(bytes(_PIECE_BYTES)).digest()
#: Threads that compute digests, while the rank trains and while it waits.
MAKING, CHECKING = 2, 8
#: Priority of the former: the rank trains, and other ranks of the job are still being saved.
_NICE = 19


def _unseen(_size_bytes: int) -> None: ...


async def contents(
    paths: Sequence[Path], threads: int, *, nice: int = 0, seen: Callable[[int], None] = _unseen
) -> list[pb.ImageContent]:
    """Name, size and digest of each file. Raises OSError. If it is cancelled, it ends soon. `seen` is called in threads, with
    how many bytes were read."""
    stop = threading.Event()
    work = asyncio.create_task(in_thread(_contents, paths, min(threads, os.cpu_count() or 1), nice, stop, seen))
    try:
        return await asyncio.shield(work)
    finally:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)


def _contents(
    paths: Sequence[Path], threads: int, nice: int, stop: threading.Event, seen: Callable[[int], None]
) -> list[pb.ImageContent]:
    sizes = [path.stat(follow_symlinks=False).st_size for path in paths]
    spans = [(path, at, size) for path, size in zip(paths, sizes, strict=True) for at in range(0, size, _SPAN_BYTES)]
    found = {path: hashlib.sha256() for path in paths}

    def digests_of(span: tuple[Path, int, int]) -> bytes:
        return _digests(*span, stop, seen)

    def give_way() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)  # of this thread alone

    with ThreadPoolExecutor(threads, "digest", give_way if nice else None) as pool:
        try:
            for (path, _, _), digests in zip(spans, pool.map(digests_of, spans), strict=True):
                found[path].update(digests)
        finally:
            stop.set()
    return [
        pb.ImageContent(name=path.name, size=size, digest=found[path].digest())
        for path, size in zip(paths, sizes, strict=True)
    ]


def _digests(path: Path, begin: int, size: int, stop: threading.Event, seen: Callable[[int], None]) -> bytes:
    """Those of the pieces of a part of a file, one after the other."""
    found, buffer = [], bytearray(_PIECE_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        data_at = -1  # where the next byte that is no hole may be
        for at in range(begin, min(begin + _SPAN_BYTES, size), _PIECE_BYTES):
            if stop.is_set():
                raise InterruptedError(f"{path} is not read any more")
            length = min(_PIECE_BYTES, size - at)
            if data_at < at:
                data_at = _next_data(fd, at, size)
            if length == _PIECE_BYTES and data_at >= at + length:
                found.append(_ZERO_PIECE)
                continue
            with memoryview(buffer)[:length] as piece:
                if os.preadv(fd, [piece], at) != length:
                    raise OSError(f"{path} became shorter while it was read")
                found.append(hashlib.sha256(piece).digest())
            seen(length)
        return b"".join(found)
    finally:
        os.close(fd)


def _next_data(fd: int, at: int, size: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is none
            raise
        return size


# ---------------------------------------------------------------- on the node that makes the image


async def of_image(credentials: Credentials, node: str, move_log: MoveLog, paths: Sequence[Path]) -> pb.MadeImage:
    """The signed list of an image that was just made here, which is on the disk then. It is made once, because the files do
    not change any more. Raises OSError."""
    if (known := await in_thread(load, move_log)) is not None:
        return known
    begin = move_log.begin
    made = pb.MadeImage(node=node, rank_uid=begin.rank_uid, snapshot=begin.coordinator, made_unix_s=time.time())
    made.files.extend(await contents(paths, MAKING, nice=_NICE))
    signature, certificates = await in_thread(image_seal.sign_as, credentials, _statement(made))
    made.signature = signature
    made.certificates.extend(certificates)
    await in_thread(save, move_log, made)
    return made


def _statement(made: pb.MadeImage) -> bytes:
    listed = sorted((file.name, file.size, file.digest.hex()) for file in made.files)
    about = [made.node, made.rank_uid, made.snapshot, made.made_unix_s, listed]
    return _PURPOSE + json.dumps(about, separators=(",", ":")).encode()


# ---------------------------------------------------------------- where it is kept


def save(move_log: MoveLog, made: pb.MadeImage) -> None:
    """Beside the journal of the image, or of what is restored from it. Blocking."""
    stored.write(move_log.folder / FILE, made.SerializeToString())
    sync_folder(move_log.folder)


def load(move_log: MoveLog) -> pb.MadeImage | None:
    """None: there is none, because the node that made the image has an older version. Raises Unreadable. Blocking."""
    try:
        return pb.MadeImage.FromString((move_log.folder / FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, DecodeError) as error:
        raise Unreadable(f"the signature of the image {move_log.move} cannot be read: {error}") from error


# ---------------------------------------------------------------- on the nodes that get it


def must_be_by(
    made: pb.MadeImage, node: str, rank_uid: str, snapshot: str, files: Iterable[pb.ImageFile], credentials: Credentials
) -> None:
    """Raises Unreadable unless this node has signed the image of this rank in this snapshot, and these are its files. Their
    content is not looked at. Blocking."""
    why = _why_not(made, node, rank_uid, snapshot, credentials)
    if not why and {file.name: file.size for file in made.files} != {file.name: file.size for file in files}:
        why = "its files are not those that were signed"
    if why:
        raise Unreadable(
            f"{node} has made the image of rank {rank_uid} in snapshot {snapshot}, and has not signed this copy: {why}",
            remedy=REMEDY,
            where=Where.SUSPENDED,
        )


REMEDY = "treat the node that has sent the copy as compromised, unless its disk or its memory is defective"


def _why_not(made: pb.MadeImage, node: str, rank_uid: str, snapshot: str, credentials: Credentials) -> str:
    from cryptography import x509

    if not made.signature:
        return "it came without a signature"
    said = (made.node, made.rank_uid, made.snapshot)
    if said != (node, rank_uid, snapshot):
        return f"it is signed as the image of rank {said[1][:80]!r} in snapshot {said[2][:80]!r} by {said[0][:80]!r}"
    try:
        chain = [x509.load_der_x509_certificate(one) for one in made.certificates[:_MAX_CHAIN]]
        at = datetime.fromtimestamp(made.made_unix_s, UTC)
    except (ValueError, OverflowError, OSError) as error:
        return f"its certificate cannot be read: {error}"
    try:
        trusted = x509.load_pem_x509_certificates(credentials.ca.read_bytes())
    except (OSError, ValueError) as error:
        raise BadConfig(f"{credentials.ca} cannot be used: {error}") from error
    if not chain:
        return "it came without a certificate"
    names = [str(name.value) for name in chain[0].subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    if names != [f"node:{node}"]:
        return f"its certificate is that of {names!r}"
    if revoked := [one.serial_number for one in chain if revocations_of(credentials.ca).revoked(one.serial_number)]:
        return f"the certificate with serial number {revoked[0]:x} has been revoked"
    if not chain[0].not_valid_before_utc <= at <= chain[0].not_valid_after_utc:
        return f"its certificate was not valid on {at:%Y-%m-%d}, when it was made"
    if not _chains_to(chain, trusted):
        return "its certificate is not one of the cluster's CA"
    if not image_seal.is_signed_by(made.certificates[0], _statement(made), made.signature):
        return "the signature does not match"
    return ""


def _chains_to(chain: Sequence[x509.Certificate], trusted: Sequence[x509.Certificate]) -> bool:
    """Whether one of the CAs has issued the first certificate, perhaps over others of the chain."""
    for number, cert in enumerate(chain):
        if any(_issued(issuer, cert) for issuer in trusted):
            return True
        if number + 1 == len(chain) or not (_is_ca(chain[number + 1]) and _issued(chain[number + 1], cert)):
            return False
    return False


def _issued(issuer: x509.Certificate, cert: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        cert.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _is_ca(cert: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        return cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


async def must_be_whole(made: pb.MadeImage, paths: Sequence[Path], seen: Callable[[int], None] = _unseen) -> None:
    """Raises Unreadable unless these files are what was signed, and OSError if one cannot be read."""
    found = {file.name: (file.size, file.digest) for file in await contents(paths, CHECKING, seen=seen)}
    wanted = {file.name: (file.size, file.digest) for file in made.files}
    if wrong := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        raise Unreadable(
            f"these files are not what {made.node} has made: {', '.join(wrong[:5])}",
            remedy=REMEDY,
            where=Where.SUSPENDED,
        )
