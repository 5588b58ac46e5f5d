"""A job is not rolled back if its launchers have ended, unless the node of one was lost."""

from __future__ import annotations

from migrator.jobs import homes
from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Unreachable

RANK = pb.Rank(uid="train-0", home_node="a")


def test_rank_whose_keeper_waits_is_rolled_back() -> None:
    assert homes.check_after_loss(RANK, {"a": {"train-0"}}, {}, ()).verdict == pb.Check.PASS


def test_rank_whose_keeper_has_ended_is_not() -> None:
    found = homes.check_after_loss(RANK, {"a": set()}, {}, ())
    assert found.verdict == pb.Check.REFUSE
    assert "--lost a" in found.remedy


def test_rank_whose_home_node_was_lost_goes_on_without_its_launcher() -> None:
    silent = {"a": Unreachable("no answer")}
    assert homes.check_after_loss(RANK, {}, silent, ()).verdict == pb.Check.WARN
    assert homes.check_after_loss(RANK, {"a": set()}, {}, {"a"}).verdict == pb.Check.WARN, "it was rebooted"
