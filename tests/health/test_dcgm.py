"""A dcgm-exporter as a source: what its fields mean, and what a hostile or broken one can do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.errors import BadConfig
from snapshotd.config import Config
from snapshotd.health import dcgm, dcgm_scrape
from snapshotd.health.alarms import Severity
from snapshotd.health.check import Now, Unable
from snapshotd.health.dcgm import Dcgm, Judge
from snapshotd.health.dcgm_scrape import Gpu
from snapshotd.health.gpus import Reading
from snapshotd.health.monitor import Monitor
from snapshotd.health.settings import CHECKS, THRESHOLDS, Settings
from snapshotd.health.settings import Dcgm as DcgmSettings
from snapshotd.health.windows import Counters

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
P = "DCGM_FI_DEV_"
NOTHING: Callable[[str, str], bool] = lambda uuid, name: False  # noqa: E731
#: As the exporter writes it.
TEXT = f"""# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{A}",pci_bus_id="00000000:65:00.0",device="nvidia0",modelName="NVIDIA H200"}} 41
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="{A}",device="nvidia0",err_code="0",err_msg="No Error, at all"}} 0
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{gpu="0",UUID="{A}",device="nvidia0"}} 2
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{gpu="1",UUID="{B}",device="nvidia1"}} 9223372036854775794
DCGM_FI_DEV_FB_FREE{{gpu="0",UUID="{A}"}} 143000
"""


class Reads:
    """One GPU that is read again and again, half a minute apart."""

    def __init__(self, is_native: Callable[[str, str], bool] = NOTHING, counters: Counters | None = None) -> None:
        self.judge = Judge(Settings(), counters or Counters(), is_native)
        self.at_s = 0.0

    def __call__(self, **values: int) -> list[tuple[str, Severity, float]]:
        self.at_s += 30.0
        found = self.judge.judged(
            {A: Gpu("GPU 0", {P + name: value for name, value in values.items()})}, Now(0, self.at_s)
        )
        assert all(each.subject == f"gpu:{A}" and each.text.startswith("GPU 0 ") and each.remedy for each in found)
        return [(each.check, each.severity, each.value) for each in found]


def test_table_names_only_known_checks_thresholds_and_native_values() -> None:
    for name, field in dcgm.table().fields.items():
        assert field.check in CHECKS, name
        assert field.rule in ("event", "rate", "flag", "growing", "hot", "xid"), name
        assert field.threshold in THRESHOLDS or field.rule in ("event", "flag", "xid"), name
        assert field.native in ("", "kernel-log", *Reading.__struct_fields__), name
        if field.rule != "xid":
            assert field.severity.upper() in Severity.__members__
            assert field.remedy in dcgm.table().remedies
            assert field.text.format(3)


def test_errors_of_memory_and_flags() -> None:
    reads = Reads()
    assert reads(ECC_DBE_VOL_TOTAL=2, UNCORRECTABLE_REMAPPED_ROWS=4) == [("gpu-ecc", Severity.CRITICAL, 2)]
    assert reads(ECC_DBE_VOL_TOTAL=2, UNCORRECTABLE_REMAPPED_ROWS=5) == [("gpu-remap", Severity.NOTICE, 1)]
    assert reads(ROW_REMAP_FAILURE=1, ROW_REMAP_PENDING=1) == [
        ("gpu-remap", Severity.CRITICAL, 1),
        ("gpu-remap", Severity.WARNING, 1),
    ]
    assert reads(ROW_REMAP_FAILURE=0, ROW_REMAP_PENDING=0) == []


def test_rates() -> None:
    reads = Reads()
    for name, check in (
        ("PCIE_REPLAY_COUNTER", "gpu-pcie"),
        ("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "gpu-nvlink"),
        ("ECC_SBE_VOL_TOTAL", "gpu-ecc"),
    ):
        assert reads(**{name: 1_000_000}) == []  # those of its whole life
        assert reads(**{name: 1_000_099}) == []
        assert reads(**{name: 1_000_100}) == [(check, Severity.WARNING, 100)]


def test_heat_must_last() -> None:
    reads = Reads()
    assert [reads(THERMAL_VIOLATION=number, GPU_TEMP=80) for number in range(1, 7)] == [[]] * 6
    assert reads(THERMAL_VIOLATION=7, GPU_TEMP=80) == [("gpu-temperature", Severity.WARNING, 1)]
    reads = Reads()
    assert [reads(GPU_TEMP=90) for _ in range(10)] == [[]] * 10
    assert [reads(GPU_TEMP=90, SLOWDOWN_TEMP=90) for _ in range(6)][-1] == [("gpu-temperature", Severity.WARNING, 90)]


def test_other_xid_is_an_alarm_of_its_severity_and_survives_a_restart() -> None:
    counters = Counters()
    assert Reads(counters=counters)(XID_ERRORS=79) == []  # it may be from long ago
    reads = Reads(counters=counters)  # restarted
    assert reads(XID_ERRORS=79) == []
    assert reads(XID_ERRORS=48) == [("gpu-xid", Severity.CRITICAL, 48)]
    assert reads(XID_ERRORS=13) == [("gpu-xid", Severity.NOTICE, 13)]
    assert reads(XID_ERRORS=0) == []


def test_what_the_daemon_reads_itself_is_not_counted_twice() -> None:
    native = {"ecc_uncorrected", "kernel-log"}
    reads = Reads(lambda uuid, name: name in native)
    assert reads(ECC_DBE_VOL_TOTAL=1, XID_ERRORS=0) == []
    assert reads(ECC_DBE_VOL_TOTAL=3, XID_ERRORS=79, ROW_REMAP_FAILURE=1) == [("gpu-remap", Severity.CRITICAL, 1)]
    native.clear()  # NVML has failed: what was counted before does not count again
    assert reads(ECC_DBE_VOL_TOTAL=3, XID_ERRORS=79) == []
    assert reads(ECC_DBE_VOL_TOTAL=4, XID_ERRORS=79) == [("gpu-ecc", Severity.CRITICAL, 1)]


# ---------------------------------------------------------------------- over HTTP


@contextlib.asynccontextmanager
async def exporter(answer: bytes, *, drip: bool = False) -> AsyncIterator[str]:
    """A server that sends `answer`, and then closes the connection or, with `drip`, sends a byte now and then."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            while drip:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"


def http(body: bytes | str, status: str = "200 OK") -> bytes:
    content = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n\r\n".encode() + content


def group(url: str, root: Path = Path("/"), user: str = "root") -> Dcgm:
    return Dcgm(root, Settings(dcgm=DcgmSettings(url=url, user=user)), Counters(), NOTHING)


async def test_exporter_is_read_and_its_alarms_have_the_names_of_the_daemons_own(tmp_path: Path) -> None:
    async with exporter(http(TEXT)) as url:
        settings = Settings(programs_dir="", root=str(tmp_path), dcgm=DcgmSettings(url=url))
        monitor = Monitor("node-1", tmp_path, settings, str(tmp_path / "no libraries"))
        monitor.start()
        try:
            async with asyncio.timeout(60):
                while not (health := await monitor.since(pb.GetHealthRequest())).alarms:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            await monitor.stop()
    assert [(one.check, one.subject, one.severity) for one in health.alarms] == [("gpu-ecc", f"gpu:{A}", pb.CRITICAL)]
    states = {check.name: check.state for check in health.checks}
    assert states["gpu-dcgm"] == states["gpu-ecc"] == pb.HealthCheck.RUNNING
    assert states["gpu-lost"] == pb.HealthCheck.UNABLE  # without NVML


async def test_exporter_that_is_away_is_one_notice_and_none_of_its_checks_an_alarm() -> None:
    async with exporter(b"") as url:
        pass
    away = group(url)
    found = [await away.read(Now(0.0, float(number))) for number in range(4)]
    assert [[(one.check, one.severity) for one in each] for each in found] == [
        [],
        [],
        [("gpu-dcgm", Severity.NOTICE)],
        [("gpu-dcgm", Severity.NOTICE)],
    ]
    assert "no process listens there" in away.reasons["gpu-ecc"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "does not answer in HTTP"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "instead of 200"),
        (b"HTTP/1.1 " + b"a" * 100_000, "does not answer in HTTP"),
        (http("", "404 Not Found"), "'404 Not Found' instead of 200"),
        (http("", "302 Found\r\nLocation: http://169.254.169.254/"), "instead of 200"),
        (http(b"\n" * (dcgm_scrape.MAX_BYTES + 1)), "sent more than"),
        (http(f'{P}GPU_TEMP{{UUID="{A}"}} 1\n' * (dcgm_scrape.MAX_LINES + 1)), "more than 2048 lines"),
        (
            http((f'{P}GPU_TEMP{{UUID="{A}",x="' + '\\"' * 400 + '"} 1\n') * 1000),
            "more than 524288 bytes of the fields",
        ),
        (http("<html>a page</html>"), "has none of the fields"),
        (http(f"{P}GPU_TEMP{{,,}} 1\n"), "cannot be parsed"),
        (http(f'{P}GPU_TEMP{{UUID="{A}"}} many\n'), "cannot be parsed"),
        (
            http("".join(f'{P}GPU_TEMP{{UUID="GPU-{n:036x}"}} 1\n' for n in range(dcgm_scrape.MAX_GPUS + 1))),
            "more than 64 GPUs",
        ),
    ],
)
async def test_nonsense_of_an_exporter_is_a_reason(answer: bytes, reason: str) -> None:
    async with exporter(answer) as url:
        asked = group(url)
        assert await asked.read(Now(0.0, 0.0)) == []
        assert reason in asked.reasons["gpu-dcgm"]
        assert asked.reasons["gpu-dcgm"].isprintable()


async def test_numbers_and_labels_that_make_no_sense_are_left_out() -> None:
    values = ("NaN", "+Inf", "-Inf", "-1", "1e308", "9223372036854775794")
    lines = [f'{P}ROW_REMAP_FAILURE{{gpu="0",UUID="{A}"}} {value}' for value in values]
    lines += [f'{P}ROW_REMAP_FAILURE{{gpu="0",UUID="{name}"}} 1' for name in ("", "GPU-1", "x" * 900, "\x1b[2J")]
    lines += [f'{P}ROW_REMAP_FAILURE{{UUID="{A}",x="{"y" * 2000}"}} 1', f"{P}ROW_REMAP_FAILURE 1", "nonsense \x00"]
    async with exporter(http("\n".join([*lines, ""]))) as url:
        asked = group(url)
        assert (await asked.read(Now(0.0, 0.0)), asked.reasons) == ([], {})


async def test_exporter_that_never_ends_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm_scrape, "LIMIT_S", 0.5)
    async with exporter(http(TEXT), drip=True) as url:
        asked = group(url)
        assert await asked.read(Now(0.0, 0.0)) == []
        assert "did not answer within 0.5 s" in asked.reasons["gpu-dcgm"]


async def test_exporter_that_always_names_other_gpus_does_not_fill_the_memory() -> None:
    counters = Counters()
    judge = Judge(Settings(), counters, NOTHING)

    def read(number: int) -> None:
        judge.judged({f"GPU-{number:036x}": Gpu("GPU 0", {P + "PCIE_REPLAY_COUNTER": 1})}, Now(0.0, 0.0))

    for number in range(dcgm_scrape.MAX_GPUS):
        read(number)
    for number in range(1000, 1100):
        with pytest.raises(Unable, match="has named more than 64 GPUs"):
            read(number)
    assert len(judge._known) == len(counters.values) == dcgm_scrape.MAX_GPUS


async def test_listener_of_another_user_is_not_asked(tmp_path: Path) -> None:
    async with exporter(http(TEXT)) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        (tmp_path / "proc/net").mkdir(parents=True)
        row = "   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  {uid}        0 1 1"
        (tmp_path / "proc/net/tcp").write_text("  sl\n" + row.format(port=port, uid=1000) + "\n")
        asked = group(url, tmp_path)
        assert await asked.read(Now(0.0, 0.0)) == []
        assert "its port belongs to user 1000" in asked.reasons["gpu-dcgm"]
        assert await group(url, tmp_path, user="1000").read(Now(0.0, 0.0)) != []
        (tmp_path / "proc/net/tcp6").write_text("  sl\n" + row.format(port=port, uid=1001) + "\n")
        other = group(url, tmp_path, user="1000")
        assert await other.read(Now(0.0, 0.0)) == []
        assert "user 1001" in other.reasons["gpu-dcgm"]


async def test_switched_off_or_without_an_exporter_nothing_is_asked(tmp_path: Path) -> None:
    async with exporter(http(TEXT)) as url:
        off = Monitor("n", tmp_path, Settings(off=("gpu-dcgm",), dcgm=DcgmSettings(url=url)), str(tmp_path))
        (check,) = [one for one in (await off.since(pb.GetHealthRequest())).checks if one.name == "gpu-dcgm"]
        assert check.state == pb.HealthCheck.OFF
        assert not any(isinstance(one, Dcgm) for one in off._groups)
    without = Monitor("n", tmp_path, Settings(), str(tmp_path))
    (check,) = [one for one in (await without.since(pb.GetHealthRequest())).checks if one.name == "gpu-dcgm"]
    assert (check.state, check.reason) == (pb.HealthCheck.UNABLE, "it is not configured")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"url": "https://127.0.0.1/metrics"}, "health.dcgm.url: must begin with http://"),
        ({"url": "http://"}, "health.dcgm.url: must begin with http://"),
        ({"url": "http://a:b@c/metrics"}, "health.dcgm.url: must begin with http://"),
        ({"url": "http://a:99999/metrics"}, "health.dcgm.url: "),
        ({"url": 9400}, "health.dcgm.url: must be the address of a dcgm-exporter"),
        ({"user": "nobody-of-that-name"}, "health.dcgm.user: there is no user"),
        ({"interval_s": 0}, "health.dcgm.interval_s: must be a number of seconds"),
        ({"uri": ""}, "health.dcgm.uri: unknown key"),
    ],
)
def test_wrong_settings_are_refused_with_their_key(table: dict[str, object], reason: str) -> None:
    with pytest.raises(BadConfig) as caught:
        Config.from_values({"health": {"dcgm": table}}, "test")
    assert reason in caught.value.message
