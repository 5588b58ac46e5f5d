"""How often and how fast written pages are sent: it ends, whatever the job does, and the job loses no more than the limit."""

from __future__ import annotations

import pytest

from snapshotd.precopy import rounds
from snapshotd.precopy.layout import MAX_BYTES, MAX_RANGES
from snapshotd.precopy.messages import CHUNK_BYTES
from snapshotd.precopy.rounds import Pace
from snapshotd.transport.image.store import MAX_CHUNKS

GIB = 1 << 30


def simulated(write_bytes_s: float, send_bytes_s: float, total_bytes: int = 8 * GIB, busy: float = 16) -> list[int]:
    """The rounds of a job that writes so much, anywhere, while so much is sent."""
    sent: list[int] = []
    elapsed_s, lost, written, took_s = 0.0, 0.0, float(total_bytes), 0.0
    while lost <= 0.05 and rounds.go_on(sent, total_bytes, elapsed_s, 240):
        lost = rounds.lost_by_faults(int(written), took_s, busy) if sent else 0.0
        sent.append(int(written))
        took_s = max(written / send_bytes_s, 0.05)
        elapsed_s += took_s
        written = min(float(total_bytes), took_s * write_bytes_s)
    return sent


def test_a_job_that_writes_a_tenth_of_its_memory_a_second_converges() -> None:
    sent = simulated(0.8 * GIB, 2 * GIB)
    assert sent[-1] < 8 * GIB / 50
    assert sum(sent) < 16 * GIB


def test_a_job_that_loses_too_much_by_page_faults_gets_one_round_more() -> None:
    assert len(simulated(0.8 * GIB, 2 * GIB, busy=1)) == 2


def test_memory_that_is_written_faster_than_it_is_sent_ends_after_two_rounds() -> None:
    assert simulated(4 * GIB, 1 * GIB, busy=64) == [8 * GIB, 8 * GIB]


def test_a_job_that_writes_nothing_needs_a_second_round_only_to_find_nothing() -> None:
    assert simulated(0, GIB) == [8 * GIB, 0]


def test_the_time_limit_ends_it_in_any_case() -> None:
    assert not rounds.go_on([8 * GIB, 4 * GIB], 8 * GIB, 240, 240)
    assert rounds.go_on([8 * GIB, 4 * GIB], 8 * GIB, 239, 240)


def test_all_rounds_have_fewer_chunks_than_the_target_takes_of_a_move() -> None:
    total_bytes, sent = MAX_BYTES, list[int]()
    while rounds.go_on(sent, total_bytes, 0, 240):
        sent.append(total_bytes // (2 << len(sent)))
    assert len(sent) > 1
    assert len(sent) * 2 * total_bytes // CHUNK_BYTES + 2 * MAX_RANGES * len(sent) < MAX_CHUNKS // 2


def test_faults_cost_a_single_thread_more_than_many() -> None:
    pages = 50_000 * rounds.PAGE_BYTES
    assert rounds.lost_by_faults(pages, 1.0, 0.5) == pytest.approx(50_000 * rounds.FAULT_S)
    assert rounds.lost_by_faults(pages, 2.0, 5.0) == pytest.approx(5_000 * rounds.FAULT_S)


def lost(pace: Pace, competes: float, other_load: float) -> float:
    """The part of its time that a job loses in the end that waits so much more while there is work."""
    for _ in range(50):
        pace.measured(other_load + competes, other_load)
    return pace.share * competes


@pytest.mark.parametrize("other_load", [0.0, 0.5])
@pytest.mark.parametrize("competes", [0.1, 0.5, 1.0])
def test_a_job_that_competes_for_processors_loses_no_more_than_the_limit(competes: float, other_load: float) -> None:
    assert lost(Pace(0.05), competes, other_load) <= 0.05 + 1e-9


def test_the_load_of_others_does_not_slow_it_down() -> None:
    pace = Pace(0.05)
    lost(pace, 0.0, 0.9)
    assert pace.share == rounds.MOST_SHARE
    assert pace.rest_s(0.9) == pytest.approx(0.1)
