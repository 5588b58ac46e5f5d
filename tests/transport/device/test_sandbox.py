"""The processes of the device-memory channel have no capability and cannot make sockets, whatever a peer sends them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.sandbox import filter as seccomp
from snapshotd.transport.device.child import Child


def fields_of(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.split() for key, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("module", ["receive", "send"])
async def test_stripe_process_is_in_its_sandbox_before_it_is_ready(module: str, tmp_path: Path) -> None:
    grown = os.eventfd(0)
    settings = {"expected_bytes": 0, "ring_bytes": 0, "ring": False, "path": str(tmp_path / "a")}
    child = await Child.start(f"snapshotd.transport.device.{module}", settings, [grown])
    try:
        await child.ready()
        fields = fields_of(child.pid)
        assert {int(fields[kind][0], 16) for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd")} == {0}
        assert fields["NoNewPrivs"] == ["1"]
        assert fields["Seccomp"] == ["2" if seccomp.available() else "0"]
    finally:
        await child.close()
        os.close(grown)
