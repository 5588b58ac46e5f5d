"""Checks on the target that an image is the one that its source has signed.

Invariant: the source's certificate comes from a TLS handshake that this daemon itself makes with the source, never from the
network process. It is fetched in Prepare, before the pause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from ssl import DER_cert_to_PEM_cert

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.addresses import split_address
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Denied, SnapshotError, Unreachable, Usage, Where
from snapshotd.api.revocation import peer_of, revocations_of
from snapshotd.moves import image_seal
from snapshotd.moves.record import Begin
from snapshotd.runtime.blocking import in_thread
from snapshotd.transport.node_certificate import shown_by


class SourceSignatures:
    """One per daemon."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._certificates: dict[str, bytes] = {}  # by node, as last seen

    async def meet(self, node: str, endpoint: str, where: Where = Where.SOURCE_RUNNING) -> None:
        """Fetches the certificate of a move's source. Raises Unreachable, or Denied if it is not that node; both are errors
        of the source."""
        try:
            host, port = split_address(endpoint)
        except ValueError as error:
            raise Usage(f"{endpoint!r} is not the endpoint of a node") from error
        with _of(node):
            try:
                found = await in_thread(shown_by, node, host, port, self._credentials)
            except OSError as error:  # includes ssl.SSLError
                raise Unreachable(
                    f"the certificate of {node}, the source of the move, cannot be read at {endpoint}: {error}",
                    where=where,
                ) from error
        self._certificates[node] = found.der

    async def check(self, begin: Begin, files: Iterable[pb.ImageFile], signature: bytes) -> None:
        """Raises Denied unless the move's source has signed these files for this move."""
        signed = await in_thread(image_seal.statement, begin, files)
        if await in_thread(self._good, begin.source_node, signed, signature):
            return
        # Its certificate may have been renewed since Prepare.
        await self.meet(begin.source_node, begin.source_endpoint, Where.SOURCE_FROZEN)
        if not await in_thread(self._good, begin.source_node, signed, signature):
            with _of(begin.source_node):
                raise Denied(
                    f"the image of move {begin.move} is not signed by its source, {begin.source_node}",
                    remedy="run the same version of snapshotd on all nodes; otherwise treat the network process of the"
                    " target, or the node that sent the image, as compromised",
                    where=Where.SOURCE_FROZEN,
                )

    def _good(self, node: str, signed: bytes, signature: bytes) -> bool:
        certificate = self._certificates.get(node)
        if certificate is None or not image_seal.is_signed_by(certificate, signed, signature):
            return False
        serial = peer_of(DER_cert_to_PEM_cert(certificate).encode()).serial
        return not revocations_of(self._credentials.ca).revoked(serial)


@contextlib.contextmanager
def _of(node: str) -> Iterator[None]:
    """Errors inside are of this node."""
    try:
        yield
    except SnapshotError as error:
        error.of_node = node
        raise
