"""Images of a snapshot that are of no use at a rollback: the job comes back from other copies, and they are named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import Cluster, until
from integration.job_commands import WHOLE_JOBS
from integration.torch_jobs import HOMES, TorchLab, at_rest
from snapshotd.api.errors import Unreadable
from snapshotd.moves import description
from snapshotd.transport.image.store import MOVE_NAME

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900), WHOLE_JOBS]

ONE, TWO, *_, FOUR = HOMES
SPARE = "spare-1"


@pytest.fixture
def torch_lab(wide_lab: Cluster) -> Iterator[TorchLab]:
    with at_rest(wide_lab) as lab:
        yield lab


def _job(nodes: Cluster, *arguments: str, expect: int = 0) -> dict[str, Any]:
    done = nodes.migrator("job", *arguments, "--json")
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{nodes.logs()}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _image(nodes: Cluster, node: str, home: str) -> Path:
    """What a node keeps of the rank that was started on `home`."""
    folders = [path for path in (nodes.run_dir(node) / "images").iterdir() if MOVE_NAME.fullmatch(path.name)]
    homes = {path: json.loads((path / description.FILE).read_bytes())["home_node"] for path in folders}
    (found,) = [path for path, of in homes.items() if of == home]
    return found


def _break(path: Path) -> bytes:
    """Reading it fails, as on a disk with bad blocks."""
    content = path.read_bytes()
    path.unlink()
    path.symlink_to("nowhere")
    return content


def _mend(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def test_job_is_rolled_back_from_a_copy_if_the_image_cannot_be_read(torch_lab: TorchLab) -> None:
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="unreadable")
    job.await_steps(3)
    _job(nodes, "snapshot", job.name)
    job.await_progress(2)
    own, copy = _image(nodes, TWO, TWO), _image(nodes, ONE, TWO)
    _break(own / "inventory.img")
    content = _break(copy / "inventory.img")
    failed = _job(nodes, "rollback", job.name, expect=Unreadable.exit_code)
    assert failed["error"] == Unreadable.code
    assert f"{TWO}: the image {own.name} of rank 1" in failed["message"], failed
    assert f"{ONE}: the image {copy.name} of rank 1" in failed["message"], failed

    _mend(copy / "inventory.img", content)
    back = _job(nodes, "rollback", job.name)
    assert back["outcome"] == "rolled back"
    assert [(one["rank"], one["node"], one["image"]) for one in back["unreadable_images"]] == [(1, TWO, own.name)]
    assert {rank["rank"]: (rank["node"], rank["from"]) for rank in back["ranks"]} == {0: (ONE, ONE), 1: (TWO, ONE)}
    assert f"the image {own.name} of rank 1 of job {job.name}" in nodes.logs()
    job.await_progress(2)
    _job(nodes, "snapshot", job.name)
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("nothing to be left", lambda: not nodes.leftovers())


def test_copy_that_its_node_has_changed_is_refused_and_the_next_one_is_used(torch_lab: TorchLab) -> None:
    """The node of the rank is lost, and its first buddy is compromised."""
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="changed")
    job.await_steps(3)
    nodes.move(job.agents[0], SPARE, rank=1)  # its launcher outlives its node
    taken = _job(nodes, "snapshot", job.name, "--copies", "2")
    first, second = next(rank["copies"] for rank in taken["ranks"] if rank["rank"] == 1)
    job.await_progress(2)
    image = _image(nodes, first, TWO)
    pages = max(image.glob("*pages-*.img"), key=lambda path: path.stat().st_blocks)
    with pages.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    nodes.lab.crash(SPARE)
    try:
        back = _job(nodes, "rollback", job.name, "--lost", SPARE)
        (bad,) = back["unreadable_images"]
        assert (bad["rank"], bad["node"], bad["image"]) == (1, first, image.name)
        assert f"not what {SPARE} has made: {pages.name}" in bad["reason"]
        (rank,) = [rank for rank in back["ranks"] if rank["rank"] == 1]
        assert rank["from"] == second
        assert f"{first} has sent an image that is refused" in nodes.logs()
        assert "check" in {part["name"] for part in back["parts"]}
        job.await_progress(2)
    finally:
        nodes.lab.boot(SPARE)
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("nothing to be left", lambda: not nodes.leftovers())


def test_copy_is_used_if_the_link_between_the_image_and_its_target_is_cut(torch_lab: TorchLab) -> None:
    """The operator, and the coordinator, reach both nodes."""
    nodes = torch_lab.cluster
    job = torch_lab.plain("ddp.py", "--pace-s", "0.3", "--until", "{end}", nodes=(ONE, TWO), name="unsent")
    job.await_steps(3)
    nodes.move(job.agents[0], SPARE, rank=1)  # so that its target reaches its launcher
    taken = _job(nodes, "snapshot", job.name)
    assert next(rank["copies"] for rank in taken["ranks"] if rank["rank"] == 1) == [ONE]
    assert taken["unsigned_on"] == [], "all nodes have this version"
    job.await_progress(2)
    image = _image(nodes, SPARE, TWO)
    nodes.lab.partition(SPARE, FOUR)
    try:
        back = _job(nodes, "rollback", job.name, "--on", f"1={FOUR}")
        (bad,) = back["unsent_images"]
        assert (bad["rank"], bad["node"], bad["image"], bad["target"]) == (1, SPARE, image.name, FOUR), bad
        assert back["unreadable_images"] == []
        assert {rank["rank"]: (rank["node"], rank["from"]) for rank in back["ranks"]} == {0: (ONE, ONE), 1: (FOUR, ONE)}
        job.await_progress(2)
    finally:
        nodes.lab.heal(SPARE, FOUR)
    job.end.touch()
    job.assert_whole()
    torch_lab.assert_as_undisturbed(job, "ddp.py", world=2)
    until("nothing to be left", lambda: not nodes.leftovers())
