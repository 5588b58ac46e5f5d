"""The target's checks of GPUs: each agrees with the choice, and together they refuse exactly when it fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.snapshotd_pb2 import Check
from snapshotd.cuda.pairing import Unfit, choose
from snapshotd.preflight import examine, refusals
from snapshotd.preflight.target import GPU_CHECKS, TARGET_CHECKS
from snapshotd.preflight.target_gpu import CONDITIONS

GIB = 1 << 30


def gpu(uuid: str, index: int = 0, name: str = "NVIDIA H200", free: int = 140) -> pb.Gpu:
    return pb.Gpu(
        uuid=f"GPU-{uuid}",
        index=index,
        name=name,
        compute_capability="9.0",
        memory_bytes=141 * GIB,
        memory_free_bytes=free * GIB,
    )


def facts() -> pb.RankFacts:
    report = pb.GpuFacts(driver_version="580.159.04", node_gpus=[gpu("a")], device_bytes=20 * GIB, processes=1)
    report.uses.add(uuid="GPU-a", memory_bytes=20 * GIB)
    return pb.RankFacts(source_node="node-1", gpu=report)


def node() -> pb.NodeInfo:
    return pb.NodeInfo(name="node-2", driver_version="580.159.04", gpus=[gpu("b", 0), gpu("c", 1, free=130)])


def verdicts(report: pb.RankFacts, here: pb.NodeInfo, wish: str = "") -> dict[str, Check]:
    """Only the checks of GPUs."""
    checks = examine(report, here, carry_paths=(), gpu_wish=wish)
    assert all(check.remedy for check in checks if check.verdict != Check.PASS)
    return {check.name: check for check in checks if check.name in CONDITIONS}


def test_suitable_node_passes() -> None:
    checks = verdicts(facts(), node())
    assert list(checks) == list(CONDITIONS)
    assert {check.verdict for check in checks.values()} == {Check.PASS}
    assert all(check.reason for check in checks.values())
    assert checks["gpu-present"].reason == "0 → 0 (NVIDIA H200, GPU-b)"
    assert verdicts(facts(), node(), "1")["gpu-present"].reason == "0 → 1 (NVIDIA H200, GPU-c)"


def test_rank_without_gpu_gets_one_gpu_check() -> None:
    (check,) = verdicts(pb.RankFacts(source_node="node-1"), node()).values()
    assert (check.name, check.verdict, check.reason) == ("gpu-present", Check.PASS, "no GPU in use")
    (check,) = verdicts(pb.RankFacts(source_node="node-1"), node(), "1").values()
    assert check.verdict == Check.WARN
    assert "--gpu 1 has no effect" in check.reason


def every(here: pb.NodeInfo, **fields: object) -> None:
    for card in here.gpus:
        for name, value in fields.items():
            setattr(card, name, value)


def busy(here: pb.NodeInfo) -> None:
    for card in here.gpus:
        card.processes.add(pid=7)


def other_machine(here: pb.NodeInfo) -> None:
    here.driver_version = "1"
    every(here, name="NVIDIA H100")


ALTERED: dict[str, tuple[Callable[[pb.NodeInfo], None], list[str]]] = {
    "no gpu": (lambda here: here.ClearField("gpus"), ["gpu-present"]),
    "other driver": (lambda here: setattr(here, "driver_version", "580.95.05"), ["gpu-driver"]),
    "no driver": (lambda here: setattr(here, "driver_version", ""), ["gpu-driver"]),
    "partitioned": (lambda here: every(here, mig=True), ["gpu-mig"]),
    "other chip": (lambda here: every(here, name="NVIDIA H100"), ["gpu-chip"]),
    "busy": (busy, ["gpu-free"]),
    "reserved": (lambda here: every(here, reserved_for="m-1"), ["gpu-free"]),
    "full": (lambda here: every(here, memory_free_bytes=19 * GIB), ["gpu-memory"]),
    "other driver and chip": (other_machine, ["gpu-driver", "gpu-chip"]),
}


@pytest.mark.parametrize("case", ALTERED)
def test_refused_by_name(case: str) -> None:
    alter, names = ALTERED[case]
    here = node()
    alter(here)
    checks = verdicts(facts(), here)
    assert [check.name for check in refusals(checks.values())] == names
    last = list(CONDITIONS).index(names[-1])
    for name in list(CONDITIONS)[last + 1 :]:
        if name == "gpu-driver" or names == ["gpu-driver"]:  # which the choice does not depend on
            continue
        assert checks[name].reason == f"not checked, because {names[-1]} failed"


def test_node_whose_gpus_cannot_be_listed_is_refused() -> None:
    here = pb.NodeInfo(name="node-2", gpu_problem="NVML: version mismatch")
    check = verdicts(facts(), here)["gpu-present"]
    assert check.verdict == Check.REFUSE
    assert check.reason == "the GPUs of node-2 cannot be listed: NVML: version mismatch"


UUIDS = st.sampled_from(["a", "b", "c"])
CARDS = st.builds(
    pb.Gpu,
    uuid=st.one_of(UUIDS, st.text(max_size=4)),
    index=st.integers(0, 3),
    name=st.sampled_from(["NVIDIA H200", "NVIDIA H200", "NVIDIA A100", ""]),
    memory_bytes=st.just(100),
    memory_free_bytes=st.integers(0, 100),
    mig=st.booleans(),
    reserved_for=st.sampled_from(["", "", "m-1"]),
    processes=st.lists(st.builds(pb.GpuProcess, pid=st.integers(1, 9)), max_size=1),
)
FACTS = st.builds(
    pb.GpuFacts,
    driver_version=st.sampled_from(["580.1", "570.1", "", "?"]),
    node_gpus=st.lists(CARDS, max_size=3),
    uses=st.lists(st.builds(pb.GpuUse, uuid=UUIDS, memory_bytes=st.integers(0, 2**64 - 1)), max_size=2),
)


@given(FACTS, st.lists(CARDS, max_size=4), st.one_of(st.just(""), st.sampled_from("012ab"), st.text(max_size=3)))
def test_checks_refuse_exactly_when_the_choice_fails(report: pb.GpuFacts, cards: list[pb.Gpu], wish: str) -> None:
    here = pb.NodeInfo(name="node-2", driver_version=report.driver_version, gpus=cards)
    try:
        choose(report, here.gpus, wish)
        expected = []
    except Unfit as unfit:
        expected = [unfit.check]
    checks = verdicts(pb.RankFacts(source_node="node-1", gpu=report), here, wish)
    assert list(checks) == list(CONDITIONS)
    assert {*CONDITIONS} == {"gpu-present", *GPU_CHECKS}
    assert "gpu-present" in TARGET_CHECKS
    assert [check.name for check in refusals(checks.values())] == expected
