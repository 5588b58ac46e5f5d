"""The three PEM files with which a process identifies itself. What uses them: api/channel.py, transport/image, network/."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from snapshotd.api.errors import BadConfig


@dataclass(frozen=True)
class Credentials:
    """Three PEM files: the cluster's CA, and this process's certificate and key."""

    ca: Path
    cert: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(ca, cert, key). Raises BadConfig with the name of a file that cannot be read."""
        contents = []
        for path in (self.ca, self.cert, self.key):
            try:
                contents.append(Path(path).read_bytes())
            except OSError as error:
                raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
        return contents[0], contents[1], contents[2]

    def read_pair(self) -> tuple[bytes, bytes, bytes]:
        """The same. Raises BadConfig also if the key is not that of the certificate, as while both are being replaced."""
        contents = self.read()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except OSError as error:  # includes ssl.SSLError
            raise BadConfig(f"{self.cert} and {self.key} cannot be used: {error}") from error
        return contents

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Differs after a file was replaced. Raises OSError."""
        found = (path.stat() for path in (self.ca, self.cert, self.key))
        return tuple((about.st_ino, about.st_mtime_ns, about.st_size) for about in found)
