"""The tables of the benchmarks contain what was measured."""

from __future__ import annotations

from integration.gpu.bench_gpu import copied_gbps

LOGS = """--- node-1
01:00:00 INFO devmem m-offloaded00 rank 0 freeze: process 7: 9 bytes taken off the GPU, copied in 0.2 s, 35.8 GB/s
01:01:00 INFO memory m-thedriver00 rank 0 freeze: checkpoint of 1 process
--- spare-1
01:00:01 INFO devmem m-offloaded00 rank 0 restore: process 7: 9 bytes put back onto the GPU, copied in 0.3 s, 25.1 GB/s
"""


def test_speed_of_the_copy_is_that_of_its_own_move() -> None:
    assert copied_gbps(LOGS, "m-offloaded00") == {"taken off": "35.8", "put back onto": "25.1"}
    assert copied_gbps(LOGS, "m-thedriver00") == {}
