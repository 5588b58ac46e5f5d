"""The choice of GPUs: every rule, and the invariants of any choice over arbitrary nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import Refused
from snapshotd.cuda.pairing import Unfit, alike, choose, driver_major
from snapshotd.preflight.target_gpu import CONDITIONS
from tests.sampling import examples

GIB = 1 << 30
H200 = ("NVIDIA H200", "9.0", 141 * GIB)
A100 = ("NVIDIA A100-SXM4-80GB", "8.0", 80 * GIB)


def gpu(
    uuid: str,
    index: int = 0,
    chip: tuple[str, str, int] = H200,
    *,
    used: int = 0,
    pids: tuple[int, ...] = (),
    mig: bool = False,
    reserved_for: str = "",
    bus: str = "",
) -> pb.Gpu:
    name, capability, size = chip
    return pb.Gpu(
        uuid=f"GPU-{uuid}",
        index=index,
        name=name,
        compute_capability=capability,
        memory_bytes=size,
        memory_free_bytes=size - used,
        mig=mig,
        processes=[pb.GpuProcess(pid=pid) for pid in pids],
        reserved_for=reserved_for,
        bus_id=bus,
    )


def facts(*gpus: pb.Gpu, driver: str = "580.159.04", **uses: int) -> pb.GpuFacts:
    """A rank with so many GiB on the named GPUs."""
    result = [pb.GpuUse(uuid=f"GPU-{uuid}", memory_bytes=size * GIB) for uuid, size in uses.items()]
    return pb.GpuFacts(driver_version=driver, node_gpus=gpus, uses=result)


def chosen(result: pb.GpuFacts, *node: pb.Gpu, wish: str = "", resumes: bool = False) -> dict[str, str]:
    pairs, _ = choose(result, node, wish, resumes=resumes)
    return {pair.old_uuid.removeprefix("GPU-"): pair.new_uuid.removeprefix("GPU-") for pair in pairs}


def refusal(result: pb.GpuFacts, *node: pb.Gpu, wish: str = "") -> tuple[str, str]:
    with pytest.raises(Unfit) as caught:
        choose(result, node, wish)
    assert caught.value.advice != Refused.remedy
    assert caught.value.message == f"{caught.value.check}: {caught.value.reason}"
    return caught.value.check, caught.value.reason


def test_gpu_that_both_nodes_have_stays() -> None:
    """Two nodes of a lab on one machine; the other process on the GPU is another rank of the job."""
    shared = gpu("a", used=60 * GIB, pids=(7, 8), reserved_for="m-other")
    pairs, text = choose(facts(shared, a=60), [shared], "")
    assert [(pair.old_uuid, pair.new_uuid) for pair in pairs] == [("GPU-a", "GPU-a")]
    assert text == "stays on 0 (NVIDIA H200, GPU-a)"


def test_resumed_rank_avoids_the_gpu_that_it_had_if_another_rank_uses_it_now() -> None:
    """It gave that GPU up when it was suspended. Another one that is unused comes first; else it shares its own."""
    had, other = gpu("a", 0, used=20 * GIB, pids=(7,)), gpu("b", 1)
    assert chosen(facts(had, other, a=60), had, other, resumes=True) == {"a": "b", "b": "a"}
    busy = gpu("b", 1, pids=(8,))
    assert chosen(facts(had, other, a=60), had, busy, resumes=True) == {"a": "a", "b": "b"}
    assert chosen(facts(had, other, a=60), had, other) == {"a": "a", "b": "b"}, "a rank that is on it"
    free = gpu("a", 0)
    assert chosen(facts(had, other, a=60), free, other, resumes=True) == {"a": "a", "b": "b"}


def test_resumed_rank_has_no_memory_on_the_gpu_that_it_had() -> None:
    full = gpu("a", used=100 * GIB, pids=(7,))
    pairs, _ = choose(facts(full, a=60), [full], "")
    assert pairs
    with pytest.raises(Unfit, match="gpu-memory"):
        choose(facts(full, a=60), [full], "", resumes=True)


def test_memory_of_the_rank_itself_counts_as_free() -> None:
    full = gpu("a", used=141 * GIB, pids=(7,))
    assert chosen(facts(full, a=140), full, wish="0") == {"a": "a"}


def test_free_gpu_of_the_same_model_is_chosen() -> None:
    result = facts(gpu("a"), a=20)
    node = (
        gpu("b", 0, pids=(7,)),
        gpu("c", 1, A100),
        gpu("d", 2, reserved_for="m-other"),
        gpu("e", 3, mig=True),
        gpu("f", 4, used=130 * GIB),
        gpu("g", 5, used=GIB),
        gpu("h", 6),
    )
    assert chosen(result, *node) == {"a": "h"}  # the emptiest
    assert chosen(result, *node[:-1]) == {"a": "g"}
    assert choose(result, node, "")[1] == "0 → 6 (NVIDIA H200, GPU-h)"


@pytest.mark.parametrize(
    ("check", "node", "text"),
    [
        ("gpu-present", (), "no GPU here"),
        ("gpu-mig", (gpu("b", mig=True),), "partitioned (MIG): 0 (NVIDIA H200, GPU-b)"),
        (
            "gpu-chip",
            (gpu("b", 0, A100), gpu("c", 1, A100)),
            "on NVIDIA H200 with 141.0 GiB (compute capability 9.0); here",
        ),
        ("gpu-chip", (gpu("b", 0, ("NVIDIA H200", "9.0", 96 * GIB)),), "with 96.0 GiB"),
        ("gpu-free", (gpu("b", pids=(7, 8)),), "taken: 0 (NVIDIA H200, GPU-b): in use by pid 7, 8"),
        ("gpu-free", (gpu("b", reserved_for="m-other"),), "reserved for move m-other"),
        ("gpu-memory", (gpu("b", used=130 * GIB),), "needs 20.0 GiB; 11.0 GiB free on 0 (NVIDIA H200, GPU-b)"),
    ],
)
def test_reason_is_named(check: str, node: tuple[pb.Gpu, ...], text: str) -> None:
    found, reason = refusal(facts(gpu("a"), a=20), *node)
    assert found == check
    assert text in reason
    if check == "gpu-chip":
        assert reason.count("NVIDIA A100") <= 1, "equal GPUs are listed once"


def test_requested_gpu_may_be_shared() -> None:
    result = facts(gpu("a"), a=20)
    node = (gpu("abcd", 0), gpu("bcde", 1, used=30 * GIB, pids=(7,)), gpu("abff", 2))
    for wish in ("1", "GPU-bcde", "gpu-BC", "bcd", "GPU-b"):
        assert chosen(result, *node, wish=wish) == {"a": "bcde"}


@pytest.mark.parametrize(
    ("wish", "check", "text"),
    [
        ("9", "gpu-present", "no GPU here is named '9'; there is 0 (NVIDIA H200, GPU-ab1)"),
        ("GPU-ab", "gpu-present", "more than one GPU here is named"),
        ("0,1", "gpu-present", "the rank uses 1 GPU, but --gpu names 2 (0,1)"),
        ("-1", "gpu-present", "no GPU here"),
        (",", "gpu-present", "names 2"),
        ("1", "gpu-chip", "NVIDIA A100"),
        ("2", "gpu-memory", "10.0 GiB free"),
        ("3", "gpu-mig", "partitioned"),
        ("4", "gpu-free", "reserved for move m-other"),
    ],
)
def test_impossible_request_is_refused(wish: str, check: str, text: str) -> None:
    node = (
        gpu("ab1", 0),
        gpu("ab2", 1, A100),
        gpu("ab3", 2, used=131 * GIB, pids=(7,)),
        gpu("ab4", 3, mig=True),
        gpu("ab5", 4, reserved_for="m-other"),
    )
    found, reason = refusal(facts(gpu("a"), a=20), *node, wish=wish)
    assert found == check
    assert text in reason


def test_index_has_precedence_over_a_uuid() -> None:
    result = facts(gpu("a"), a=1)
    node = (gpu("2abc", 0), gpu("77ab", 1), gpu("3abc", 2))
    assert chosen(result, *node, wish="2") == {"a": "3abc"}
    assert chosen(result, *node, wish="77") == {"a": "77ab"}


def test_every_gpu_of_the_source_gets_a_counterpart() -> None:
    """The driver needs all of them. Those that the rank does not use may be busy, and stay themselves if possible."""
    result = facts(gpu("a", 0), gpu("b", 1), gpu("c", 2, A100), b=20)
    node = (gpu("x", 0, pids=(7,)), gpu("y", 1), gpu("z", 2, A100, pids=(8,)), gpu("v", 3, A100))
    assert chosen(result, *node) == {"a": "x", "b": "y", "c": "z"}
    assert refusal(result, *node[:2])[0] == "gpu-present"
    check, reason = refusal(result, *node[:2], gpu("w", 2))
    assert check == "gpu-chip"
    assert "the source's 2 (NVIDIA A100-SXM4-80GB, GPU-c)" in reason


def test_gpu_at_the_same_place_is_preferred() -> None:
    """Two ranks from GPU 3 of two nodes must not both end on the first free GPU, where both would report the same bus id."""
    result = facts(*(gpu(f"s{i}", i, bus=f"0000:{i + 16:02x}:00.0") for i in range(4)), s3=20)
    node = [gpu(f"t{i}", i, bus=f"0000:{i + 16:02x}:00.0", used=i * 5 * GIB) for i in range(4)]
    assert chosen(result, *node) == {"s0": "t0", "s1": "t1", "s2": "t2", "s3": "t3"}
    assert choose(result, node, "")[1] == "3 → 3 (NVIDIA H200, GPU-t3)"
    others = [gpu(f"t{i}", i, bus=f"0000:{35 - i:02x}:00.0") for i in range(4)]
    assert chosen(result, *others)["s3"] == "t3"  # no GPU has that bus id: the same index
    assert choose(result, others, "")[1].endswith(", because no GPU here is at 0000:13:00.0")
    swapped = [gpu("t0", 0, bus="0000:13:00.0"), *others[1:]]
    assert chosen(result, *swapped)["s3"] == "t0"  # by the bus id rather than by the index
    node[3] = gpu("t3", 3, bus="0000:13:00.0", pids=(7,))
    assert chosen(result, *node)["s3"] == "t0"
    text = "because the one at 0000:13:00.0 is taken: 3 (NVIDIA H200, GPU-t3): in use by pid 7"
    assert text in choose(result, node, "")[1]


def test_rank_that_sees_some_gpus_keeps_its_index() -> None:
    """The driver cannot map GPUs for it: only the same index is possible, and a refusal comes before the job is paused."""
    result = facts(gpu("a", 0), gpu("b", 1), b=20)
    result.visible = 1
    node = (gpu("x", 0), gpu("y", 1, used=50 * GIB))
    assert chosen(result, *node)["b"] == "y"
    check, reason = refusal(result, node[0], gpu("y", 2))
    assert check == "gpu-present"
    assert "the rank sees 1 of 2 GPUs (CUDA_VISIBLE_DEVICES)" in reason
    assert refusal(result, node[0], gpu("y", 1, pids=(7,)))[0] == "gpu-free"
    assert refusal(result, *node, wish="0")[0] == "gpu-present"
    result.visible = 2
    assert chosen(result, node[0], gpu("y", 1, pids=(7,)))["b"] == "x"


def test_lost_gpu_gets_a_counterpart_too() -> None:
    """A process that has initialised CUDA knows it, and the driver needs a pair for it."""
    lost = gpu("b", 1)
    lost.lost = True
    result = facts(gpu("a", 0), lost, a=20)
    assert chosen(result, gpu("x", 0), gpu("y", 1)) == {"a": "x", "b": "y"}
    result = facts(gpu("a", 0), lost, b=20)
    assert "has lost the GPU that its rank uses" in refusal(result, gpu("x", 0), gpu("y", 1))[1]


def test_request_on_the_same_machine_swaps_two() -> None:
    here = (gpu("a", 0, used=20 * GIB, pids=(7,)), gpu("b", 1), gpu("c", 2))
    assert chosen(facts(*here, a=20), *here, wish="2") == {"a": "c", "b": "b", "c": "a"}


def test_largest_share_of_a_rank_on_several_gpus_is_placed_first() -> None:
    result = facts(gpu("a", 0), gpu("b", 1), a=20, b=100)
    node = (gpu("x", 0, used=41 * GIB), gpu("y", 1), gpu("z", 2, used=50 * GIB))
    assert chosen(result, *node) == {"a": "x", "b": "y"}  # the one that needs more was placed first
    assert chosen(result, *node, wish="2,0") == {"a": "z", "b": "x"}
    assert "--gpu names one GPU twice" in refusal(result, *node, wish="1,1")[1]
    assert refusal(result, *node, wish="1,2")[0] == "gpu-memory"


def test_rank_without_device_memory_is_on_no_gpu() -> None:
    result = facts(gpu("a"))
    assert chosen(result, gpu("b", pids=(7,))) == {"a": "b"}
    assert choose(result, [gpu("a")], "")[1] == "on no GPU yet"


def test_old_driver_restores_only_onto_the_same_gpu() -> None:
    here = (gpu("a", 0, used=20 * GIB), gpu("b", 1))
    result = facts(*here, driver="570.86.15", a=20)
    assert chosen(result, *here) == {"a": "a", "b": "b"}
    assert refusal(result, *here, wish="1")[0] == "gpu-driver"
    assert refusal(result, gpu("x", 0), gpu("y", 1))[0] == "gpu-driver"
    assert refusal(result, here[0], gpu("y", 1))[0] == "gpu-driver"


def test_contradictory_facts_are_refused() -> None:
    assert refusal(facts(), gpu("b"))[0] == "gpu-present"
    assert "GPU-zz" in refusal(facts(gpu("a"), zz=1), gpu("b"))[1]


@pytest.mark.parametrize(("version", "major"), [("580.159.04", 580), ("570", 570), ("", 0), ("r580", 0), ("5x", 0)])
def test_driver_major_is_parsed(version: str, major: int) -> None:
    assert driver_major(version) == major


def test_models_are_compared() -> None:
    assert alike(gpu("a"), gpu("b", chip=(H200[0], H200[1], 139 * GIB)))  # what ECC and the driver keep differs
    assert not alike(gpu("a"), gpu("b", chip=(H200[0], H200[1], 80 * GIB)))
    assert not alike(gpu("a"), gpu("b", chip=(H200[0], "10.0", H200[2])))
    assert not alike(gpu("a"), gpu("b", chip=("NVIDIA H100", H200[1], H200[2])))


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
GPUS = st.builds(
    gpu,
    NAMES,
    st.integers(0, 4),
    st.sampled_from([H200, H200, A100]),
    used=st.integers(0, 80 * GIB),
    pids=st.sampled_from([(), (), (7,)]),
    mig=st.sampled_from([False, False, True]),
    reserved_for=st.sampled_from(["", "", "m-other"]),
)
WISHES = st.one_of(st.just(""), st.sampled_from(["0", "1", "GPU-a", "b", "0,1"]), st.text(max_size=5))


@settings(max_examples=examples(100))
@given(
    st.lists(GPUS, max_size=4),
    st.dictionaries(NAMES, st.integers(0, 90), max_size=2),
    st.lists(GPUS, max_size=5),
    WISHES,
    st.sampled_from(["580.1", "570.1", ""]),
)
def test_any_choice_is_valid_for_the_driver(
    source: list[pb.Gpu], uses: dict[str, int], node: list[pb.Gpu], wish: str, driver: str
) -> None:
    result = facts(*source, driver=driver, **uses)
    refusal: Unfit | None = None
    pairs: list[pb.GpuPair] = []
    try:
        pairs, _ = choose(result, node, wish)
    except Unfit as unfit:
        refusal = unfit
    if refusal is not None:
        assert refusal.check in CONDITIONS
        assert refusal.reason
        return
    old, new = [pair.old_uuid for pair in pairs], [pair.new_uuid for pair in pairs]
    assert set(old) == {gpu.uuid for gpu in source}
    assert len(set(old)) == len(old)
    assert len(set(new)) == len(new)
    assert set(new) <= {gpu.uuid for gpu in node}
    assert driver == "580.1" or old == new
    places = {pair.old_uuid: pair.new_uuid for pair in pairs}
    for use in result.uses:
        if places[use.uuid] == use.uuid:
            continue
        mates = [mate for mate in node if mate.uuid == places[use.uuid]]
        assert any(mate.memory_free_bytes >= use.memory_bytes for mate in mates)
        assert not all(mate.mig or mate.reserved_for for mate in mates)
        assert wish or not all(mate.processes for mate in mates)
