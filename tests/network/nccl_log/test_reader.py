from __future__ import annotations

import io
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_strategy.network.nccl_log import Transport, read_transport

IB = "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0"
FOUND = "NET/IB : Using [0]mlx5_ib0:1/IB/SHARP {}; OOB eth0:10.0.0.4<0>"


def read(*texts: str) -> Transport:
    return read_transport(f"node-0:1:2 [0] NCCL INFO {text}" for text in texts)


@pytest.mark.parametrize(
    ("texts", "gpudirect"),
    [
        ([IB, f"{IB}/GDRDMA"], True),
        ([f"{IB}/GDRDMA(PCI)"], True),
        ([IB, "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"], False),
        (["Using network Socket"], False),
        (["NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)"], False),
        (["NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"], None),
        (
            [
                "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
                "GPU Direct RDMA Disabled for GPU 1 / HCA 0 (distance 6 > 4)",
            ],
            False,
        ),
        (["Using network IB"], None),
    ],
)
def test_gpudirect(texts: list[str], gpudirect: bool | None) -> None:
    assert read(*texts).gpudirect is gpudirect


@pytest.mark.parametrize(
    ("texts", "sharp"),
    [
        (["Using network IB"], None),
        ([FOUND.format("[RO]")], "available"),
        (["CollNet 05/0 : 5 [receive] via COLLNET/SHARP/5/GDRDMA"], "used"),
    ],
)
def test_sharp(texts: list[str], sharp: str | None) -> None:
    assert read(*texts).sharp == sharp


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["NCCL version 2.18.6+cuda12.1", FOUND.format("[RO]"), "Using network IB"], True),
        (["NCCL version 2.18.6+cuda12.1", FOUND.format(""), "Using network IB"], False),
        (["NCCL version 2.11.4+cuda11.4", FOUND.format(""), "Using network IB"], None),
        (["NCCL version 2.18.6+cuda12.1", FOUND.format(""), "Using network IBext"], None),
        (["NCCL version 2.18.6+cuda12.1", "Using network IB"], None),
    ],
)
def test_relaxed_ordering(texts: list[str], expected: bool | None) -> None:
    assert read(*texts).relaxed_ordering is expected


@pytest.mark.parametrize(
    ("texts", "plugin"),
    [
        (["Using network IBext", IB], "IB"),
        (["Using network IBext"], "IBext"),
        (["Using network IB", "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"], "IB"),
        (["CollNet 05/0 : 5 [receive] via COLLNET/SHARP/5"], None),
    ],
)
def test_plugin(texts: list[str], plugin: str | None) -> None:
    assert read(*texts).plugin == plugin


def test_proxies_and_ways_inside_the_node() -> None:
    local = "Channel 00/0 : 0[0] -> 1[1] via"
    transport = read(f"{IB}(5)/GDRDMA", f"{local} P2P/CUMEM", f"{local} P2P/CUMEM", f"{local} SHM/direct/direct")
    assert transport.pxn
    assert transport.intra_node == "P2P/CUMEM"
    assert (transport.network_channels, transport.local_channels) == (1, 3)


SAMPLES = Path(__file__).parents[2] / "samples" / "nccl_logs"
FOUR_NODES = next(SAMPLES.glob("02*.log")).read_text()
MEBIBYTE = 1 << 20
WORDS = st.sampled_from(
    ["NCCL INFO ", "NCCL WARN ", "NET/IB : Using [0]", "mlx5_0:1/IB", " via ", "NET/IB/0", "Got completion", "\n", "²"]
)


@given(st.binary(max_size=400) | st.lists(st.binary(max_size=20) | WORDS.map(str.encode)).map(b"".join))
def test_no_content_raises(content: bytes) -> None:
    transport = read_transport(content)
    assert (transport.kind == "unknown") == (transport.evidence == "none") or transport.network_channels


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 5000, b"\xff\xfe" * 500, b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9]
)
def test_a_file_that_is_no_log(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    transport = read_transport(path)
    assert (transport.kind, transport.evidence, transport.errors) == ("unknown", "none", ())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, len(FOUR_NODES)))
def test_a_log_cut_off_anywhere_is_infiniband_or_not_known(end: int) -> None:
    assert read_transport(FOUR_NODES[:end]).kind in ("ib", "unknown")


def test_every_sample_cut_off_anywhere_in_its_last_part() -> None:
    for path in SAMPLES.glob("*.log"):
        text = path.read_text()[-1500:]
        whole = read_transport(text).kind
        kinds = {read_transport(text[:end]).kind for end in range(0, len(text), 7)}
        assert kinds <= {whole, "unknown", "p2p-only"}, path


@settings(max_examples=20, deadline=None)
@given(st.integers())
def test_hosts_may_be_interleaved_in_any_order(seed: int) -> None:
    by_host: dict[str, list[str]] = {}
    for line in FOUR_NODES.splitlines():
        by_host.setdefault(line.split(":")[0], []).append(line)
    turns = [host for host, lines in by_host.items() for _ in lines]
    random.Random(seed).shuffle(turns)
    left = {host: iter(lines) for host, lines in by_host.items()}
    mixed, straight = read_transport(next(left[host]) for host in turns), read_transport(FOUR_NODES)
    for name in ("kind", "gpudirect", "hcas", "hosts", "network_channels", "local_channels", "sharp", "plugin"):
        assert getattr(mixed, name) == getattr(straight, name)


def test_training_output_between_the_lines_changes_nothing() -> None:
    lines = [f"{line}\r\nstep {step}\r\n" for step, line in enumerate(FOUR_NODES.splitlines())]
    assert read_transport("".join(lines)) == read_transport(FOUR_NODES)


def test_all_forms_of_a_log_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(FOUR_NODES)
    expected = read_transport(path)
    with path.open() as text, path.open("rb") as binary:
        assert read_transport(text) == read_transport(binary) == expected
    lines = io.StringIO(FOUR_NODES).readlines()
    assert read_transport(lines) == read_transport(FOUR_NODES) == read_transport(FOUR_NODES.encode()) == expected


def adversarial(number: int) -> Iterator[str]:
    letters = str.maketrans("0123456789", "abcdefghij")
    for index in range(number):
        name = f"{index}".translate(letters) + "x" * 50
        prefix = f"{name}:{index}:{index} [0] "
        yield f"{prefix}NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{name}/0"
        yield f"{prefix}NCCL INFO NET/IB : Using [0]{name}:1/IB ; OOB {name}:10.0.0.4<0>"
        yield f"{prefix}{name}.cc:1 NCCL WARN {name} failed"
        yield f"[rank{index}]: ncclSystemError: {name}"


def test_memory_is_bounded_by_any_number_of_names() -> None:
    tracemalloc.start()
    transport = read_transport(adversarial(9_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * MEBIBYTE
    assert len(transport.errors) < 100
    assert sum(error.count for error in transport.errors) == 18_000


def test_only_the_standard_library_is_loaded() -> None:
    heavy = ("torch", "lightning", "mlflow", "hydra", "rich", "numpy")
    code = f"import sys, azureml_strategy.network.nccl_log; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
