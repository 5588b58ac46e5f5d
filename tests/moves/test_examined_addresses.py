"""What Examine receives about a rank's connections comes from an operator, and may be anything."""

from __future__ import annotations

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Usage
from snapshotd.moves.peers import connections


@pytest.mark.parametrize("kind", [pb.Rewire.PEER, pb.Rewire.INSIDE])
def test_address_that_is_none_is_an_error_of_the_caller(kind: pb.Rewire.Kind.ValueType) -> None:
    with pytest.raises(Usage, match="is invalid: '' is not an IP address"):
        connections.examine([pb.Rewire(kind=kind)], "train-0-00000000")
