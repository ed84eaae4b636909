"""Each benchmark runs with tiny numbers and writes what its page promises; how fast anything is, no test asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.faults import network

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
AZURITE = Path(sys.prefix, "azurite", "node_modules")


@pytest.fixture
def isolated_nodes() -> Iterator[None]:
    """Skip where there can be none; afterwards, remove those of a script that was killed."""
    reason = network.why_not()
    if reason:
        pytest.skip(reason)
    yield
    for path in Path("/run/netns").glob("azureml-*"):
        if not psutil.pid_exists(int(path.name.split("-")[1])):
            subprocess.run(["ip", "netns", "delete", path.name], check=True)


def start(script: Path, *arguments: str) -> None:
    """Run a script to its end."""
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout


def run(script: str, results: Path, *arguments: str) -> dict[str, Any]:
    """Run a script and read what it wrote."""
    start(BENCHMARKS / f"{script}.py", "--results", str(results), *arguments)
    written = json.loads((results / f"{script}.json").read_text())
    assert written["benchmark"] == script
    assert {"cpu", "gpus", "packages"} <= written["machine"].keys()
    assert written["settings"]
    return written["figures"]


def test_startup(tmp_path: Path) -> None:
    figures = run("startup", tmp_path, "--rounds", "1", "--warmup", "0")
    assert figures["heavy_modules_imported"] == []
    assert figures["targets"].keys() == {"import azureml_strategy", "azureml-strategy --help"}
    for kind in ("wall_s", "added_s"):
        assert {"import lightning", "import hydra", *figures["targets"]} < figures[kind].keys()
    assert figures["wall_s"]["import lightning"].keys() == {"median", "low", "high", "count"}


@pytest.mark.timeout(900)
def test_compile_restart(tmp_path: Path) -> None:
    figures = run("compile_restart", tmp_path, "--rounds", "1", "--layers", "1")
    compiled = figures["graphs_compiled"]
    assert (compiled["first start"] > 0, compiled["second start"], compiled["not compiled"]) == (True, 0, 0)
    for kind in ("wall_s", "cpu_s", "wall_s_ratio", "cpu_s_ratio"):
        assert figures[kind].keys() == compiled.keys()
    assert figures["target"].keys() == {"figure", "at_most", "met"}


def test_planned_rates(tmp_path: Path) -> None:
    figures = run("planned_rates", tmp_path, "--without-fit")
    assert all(abs(each["error"]) < (0.2 if each["gpu"] == "H100" else 0.35) for each in figures["one_gpu"])


@pytest.mark.slow
@pytest.mark.usefixtures("isolated_nodes")
@pytest.mark.timeout(900)
def test_planned_steps(tmp_path: Path) -> None:
    tiny = {"rounds": 1, "steps": 1, "images": 2, "pixels": 32, "sequences": 4, "tokens": 8, "layers": 2, "width": 64}
    settings = ["ResNet-50, DDP", "GPT, FSDP2", "GPT, pipeline of 2 micro-batches"]
    numbers = [f"--{name}={value}" for name, value in tiny.items()]
    figures = run("planned_steps", tmp_path, *numbers, "--more-nodes-at", "--rates", "1gbit", "--settings", *settings)
    assert [each["setting"] for each in figures["calibration"]] == settings[:2]
    assert "more_nodes" not in figures
    assert [each["setting"] for each in figures["cases"]] == settings[2:]
    assert all(each["predicted_at"] <= each["trained_at"] for each in figures["turns"]), "predicted before measured"
    assert figures["summary"].keys() == {"error", "naive_error"}


def test_submit(tmp_path: Path) -> None:
    figures = run("submit", tmp_path, "--rounds", "1", "--warmup", "0", "--files", "200")
    assert figures["targets"].keys() == {"azureml-strategy submit --dry-run", "list_snapshot"}
    assert (
        figures["wall_s"].keys()
        == {"bare interpreter", "import azure.ai.ml", "os.walk and sizes"} | figures["targets"].keys()
    )


def test_report_speed(tmp_path: Path) -> None:
    figures = run("report_speed", tmp_path, "--rounds", "1", "--warmup", "0", "--points", "2000")
    assert (
        figures["wall_s"].keys()
        == figures["cpu_s"].keys()
        == {"bare interpreter", "import mlflow", "azureml-strategy report"}
    )
    assert 0 < figures["page_bytes"] < 2**20


@pytest.mark.slow
def test_ddp_step(tmp_path: Path) -> None:
    tiny = {"rounds": 1, "steps": 2, "network": "small", "pixels": 16, "batch-size": 2}
    figures = run("ddp_step", tmp_path, *(f"--{name}={value}" for name, value in tiny.items()))
    loopback = figures["loopback"]
    cases = {"torch", "lightning", "azureml_ddp"}
    assert loopback["step_s"].keys() == loopback["ratio_to_lightning"].keys() == cases
    assert loopback["ratio_to_lightning"]["lightning"]["median"] == 1
    assert loopback["target"]["azureml_ddp_at_most"] == 1.01
    assert len({round(total, 3) for total in loopback["trained_parameter_sum"].values()}) == 1, "they train alike"


@pytest.mark.slow
def test_local_sgd_step(tmp_path: Path) -> None:
    """Where nodes cannot be isolated, the result says why."""
    tiny = {"rounds": 1, "ddp-steps": 2, "network": "small", "pixels": 16, "batch-size": 2, "bandwidth": "500mbit"}
    figures = run("local_sgd_step", tmp_path, *(f"--{name}={value}" for name, value in tiny.items()))["500mbit"]
    if "skipped" in figures:
        pytest.skip(figures["skipped"])
    ours = {"azureml_local_sgd", "overlapped"}
    torchs, alone = "PostLocalSGDOptimizer", "computing alone"
    assert figures["step_s"].keys() == ours | {"azureml_ddp", torchs, alone}
    assert figures["speedup_over_ddp"]["azureml_ddp"]["median"] == 1
    assert figures["share_of_the_speed_of_computing_alone"][alone]["median"] == 1
    assert figures["ratio_to_torch"].keys() == ours
    # Packets' headers count as well, and the tiny network sends little else.
    assert figures["ddp_bytes_to_those_of"].keys() == ours | {torchs}
    assert all(each["median"] > 10 for each in figures["ddp_bytes_to_those_of"].values())
    assert figures["targets"]["speedup_of_local_sgd_at_least"] == 2.2


@pytest.mark.exhaustive
def test_tune_ddp(tmp_path: Path) -> None:
    tiny = {"rounds": 1, "steps": 1, "network": "small", "pixels": 16, "batch-size": 2, "grid-steps": 1}
    options = [f"--{name}={value}" for name, value in tiny.items()]
    figures = run("tune_ddp", tmp_path, *options, "--bandwidth=none", "--grid-at=none", "--grid-most=4")["none"]
    cases = {"default", "tuned, lossless", "tuned, bf16 allowed", "tuned, all allowed"}
    assert figures["step_s"].keys() == figures["picks"].keys() == cases
    assert figures["speedup_over_default"]["default"]["median"] == 1
    assert figures["kept_the_default"]["default"] is True
    assert all(passes > 5 for passes in figures["passes"].values())
    grid = figures["grid"]
    assert grid["settings"] == len(grid["step_s"]) == 4
    assert 4 * 3 <= grid["passes"] <= 4 * 4
    assert {grid["best"], grid["pick"], figures["picks"]["default"]} <= grid["final_step_s"].keys()
    assert grid["pick"] == figures["picks"]["tuned, all allowed"]
    steps = {name: step["median"] for name, step in grid["final_step_s"].items()}
    assert grid["pick_to_best"]["median"] == pytest.approx(steps[grid["pick"]] / min(steps.values()))
    assert list(grid["step_s"].values()) == sorted(grid["step_s"].values())


@pytest.mark.slow
def test_local_sgd_accuracy(tmp_path: Path) -> None:
    options = ["--seeds", "0", "--cases", "DiLoCo", "--tasks", "gpt", "--gpt-length", "20"]
    gpt = run("local_sgd_accuracy", tmp_path, *options)["gpt"]
    cases = {"azureml_ddp", "DiLoCo"}
    assert gpt["mean"].keys() == gpt["standard_deviation"].keys() == cases
    assert gpt["optimizer_steps"] == 20
    assert gpt["strategy"]["azureml_ddp"] == {}
    assert {"period", "warmup_steps", "outer_learning_rate"} < gpt["strategy"]["DiLoCo"].keys()
    for case, values in gpt["by_seed"].items():
        assert gpt["mean"][case] == pytest.approx(*values)
    assert gpt["worse_by"]["DiLoCo"] == pytest.approx(gpt["mean"]["DiLoCo"] - gpt["mean"]["azureml_ddp"])
    again = run("local_sgd_accuracy", tmp_path, *options, "--go-on")["gpt"]
    assert again == gpt, "what was written is kept"


@pytest.mark.slow
def test_checkpoint_stall(tmp_path: Path) -> None:
    tiny = {"fits": 1, "rounds": 2, "window": 2, "vocabulary": 64, "layers": 1, "width": 64, "length": 8, "touched": 0}
    figures = run("checkpoint_stall", tmp_path, *(f"--{name}={value}" for name, value in tiny.items()))
    peers = {"AsyncCheckpointIO", "async_save", "async_save, stager kept"}
    assert figures["cost_s"].keys() == figures["first_cost_s"].keys() == peers | {"JobCheckpoint"}
    assert all(stall["count"] == 2 and stall["median"] > 0 for stall in figures["stall_s"].values())
    assert all(stall["count"] == 1 and stall["median"] > 0 for stall in figures["first_stall_s"].values())
    for name, cost in figures["cost_s"].items():
        parts = figures["stall_s"][name], figures["added_to_the_steps_that_follow_s"][name]
        assert cost["median"] == pytest.approx(sum(each["median"] for each in parts)), "of two values: the mean"
    assert figures["ratio_of_median_costs_ours_to"].keys() == peers
    assert figures["better_one"] in peers - {"AsyncCheckpointIO"}
    assert figures["target"]["ratio_to_the_better_at_most"] == 1.0


@pytest.mark.slow
def test_replica_check(tmp_path: Path) -> None:
    figures = run("replica_check", tmp_path, "--rounds", "1", "--steps", "4")
    assert figures.keys() == {"all", "comparison", "target"}
    for name in ("all", "comparison"):
        each = figures[name]
        assert each["s_per_step"].keys() == each["share_of_50_ms"].keys() == {"wall", "cpu"}
        assert each["s_per_step"]["cpu"]["median"] > 0


def test_agreement(tmp_path: Path) -> None:
    figures = run("agreement", tmp_path, "--rounds", "1", "--steps", "4")
    assert figures["step_s"].keys() == {"with", "without"}
    assert figures["hooks_s"].keys() > {"HangWatch.on_train_batch_end", "TerminateTogether.on_step_boundary"}
    assert figures["main_thread_s_per_step"]["median"] > 0
    threads = {"control-channel", "scheduled-events", "hang-watch"}
    assert figures["thread_cpu_s_per_step"].keys() == threads


@pytest.mark.slow
def test_termination(tmp_path: Path) -> None:
    ours, lightnings = "azureml_ddp, rank 1 told", "ddp, rank 1 told"
    tiny = ["--smoke", "--rounds", "1", "--warmup", "0", "--pixels", "16", "--cases", ours, lightnings]
    jobs = run("termination", tmp_path, *tiny)["jobs"]
    assert jobs.keys() == {ours, lightnings}
    assert jobs[ours]["jobs_that_saved"] == jobs[ours]["jobs"] == 1
    assert jobs[ours]["exit_codes"] == [143]
    assert jobs[ours]["saved_after_s"]["median"] > 0


@pytest.mark.slow
def test_zero_step(tmp_path: Path) -> None:
    tiny = {"rounds": 1, "steps": 2, "layers": 1, "width": 16, "length": 8, "batch-size": 2}
    figures = run("zero_step", tmp_path, *(f"--{name}={value}" for name, value in tiny.items()))
    assert figures["step_s"].keys() == {"lightning", "azureml_deepspeed"}
    assert figures["ratio_to_lightning"]["count"] == 1
    assert figures["target"]["azureml_deepspeed_at_most"] == 1.01
    assert len(set(figures["last_loss"].values())) == 1, "they train alike"


@pytest.mark.slow
def test_pretrained_memory(tmp_path: Path) -> None:
    figures = run("pretrained_memory", tmp_path, "--layers=1", "--width=64")
    assert figures["met"] == {"peak_bytes": True, "read_bytes": True}
    assert len(figures["ranks"]) == 2
    assert sum(rank["read_bytes"] for rank in figures["ranks"]) >= figures["file_bytes"], "it was loaded"


def test_loss_memory(tmp_path: Path) -> None:
    sizes = ("--tokens=4096", "--vocabulary=8192", "--width=32")  # several chunks, without which nothing is saved
    figures = run("loss_memory", tmp_path, *sizes, "--rounds=1", "--warmup=0")
    assert figures["met"] == {"saved_bytes": True, "peak_bytes": True}
    for kind in ("float32", "bfloat16"):
        ours, theirs = (figures["cases"][f"{name}, {kind}"]["loss"]["median"] for name in ("in chunks", "of logits"))
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_sequence_memory(tmp_path: Path) -> None:
    figures = run("sequence_memory", tmp_path, "--tokens=64", "--layers=1", "--width=32")
    (loss,) = {rank["sequence_parallel_size=2"]["loss"] for rank in figures["ranks"]}
    assert loss == pytest.approx(sum(rank["azureml_ddp"]["loss"] for rank in figures["ranks"]) / 2, rel=1e-5)
    assert figures["ratio"] < 0.6


@pytest.mark.slow
def test_pipeline_step(tmp_path: Path) -> None:
    tiny = {"rounds": 1, "steps": 2, "layers": 2, "width": 16, "tokens": 8, "micro-batches": 2, "micro-batch-size": 1}
    figures = run("pipeline_step", tmp_path, *(f"--{name}={value}" for name, value in tiny.items()), "--bubbles", "2")
    assert figures["step_s"].keys() == {"azureml_deepspeed_pipeline", "deepspeed"}
    assert figures["ratio_to_deepspeed"]["count"] == 1
    assert 0 < figures["bubble"]["2"]["median"] < 1
    assert figures["bubble_formula"] == {"2": pytest.approx(1 / 3)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resnet50_gpu(tmp_path: Path) -> None:
    figures = run("resnet50_gpu", tmp_path, "--smoke", "--rounds", "1")
    assert figures["copy_bytes_per_s"] > 0
    for mode in ("eager", "compiled"):
        half = figures[mode]
        assert half["left_out"] == {}
        assert half["images_per_s"].keys() == half["to_loop"].keys() | {"loop"} >= {"loop", "lightning", "recipe"}
        assert half["recipe_to_lightning"]["count"] == half["recipe_to_loop"]["count"] == 1
        assert half["share_of_memory_bound"]["recipe"]["measured copies"] > 0
    ablation = {"compile=blocks", "SGD not fused", "CUDA graphs", "not channels_last", "lightning, graphs not cut"}
    assert figures["compiled"]["to_loop"].keys() > ablation
    assert figures["compiled"]["graphs_compiled"] > figures["eager"]["graphs_compiled"] == 0
    assert figures["targets"]["met"].keys() == {"to_loop", "images_per_s"}


@pytest.mark.timeout(900)
def test_gpt_gpu(tmp_path: Path) -> None:
    figures = run("gpt_gpu", tmp_path, "--smoke", "--rounds", "1")
    parts = ("by_hand", "recipe", "llama", "preemption")
    assert [figures[part]["left_out"] for part in parts] == [{}] * len(parts)
    assert figures["by_hand"]["tokens_per_s"].keys() == {"compiled", "eager", "transformers' GPT-2, compiled"}
    ablation = {"compile=off", "compile=whole", "CUDA graphs", "vocabulary not padded", "query, key and value apart"}
    ablation |= {"AdamW not fused", "loss of all logits"}
    assert figures["recipe"]["to_loop"].keys() == ablation | {"recipe", "lightning"}
    assert figures["llama"]["to_loop"].keys() == {"recipe", "compile=off"}
    assert figures["recipe"]["targets"]["met"].keys() == {"to_loop", "tokens_per_s"}
    assert figures["preemption"]["kept_to_cold"] > 0


@pytest.mark.timeout(900)
def test_compiled_gpt(tmp_path: Path) -> None:
    figures = run("compiled_gpt", tmp_path, "--smoke", "--rounds", "2", "--steps", "2")
    assert figures.keys() == {"blocks", "whole", "lightning"}
    for found in figures.values():
        assert found["ratio_to_loop"]["count"] == 2
        assert found["last_loss"]["fit"] == pytest.approx(found["last_loss"]["loop"], rel=1e-5)
        assert min(found["first_step_cpu_s"].values()) > 0


def test_read_transport(tmp_path: Path) -> None:
    figures = run("read_transport", tmp_path, "--megabytes", "1", "--rounds", "1", "--warmup", "0")
    assert figures


def test_doctor(tmp_path: Path) -> None:
    figures = run("doctor", tmp_path, "--rounds", "1", "--warmup", "0")
    assert figures["targets"].keys() == {"azureml-strategy doctor"}


def test_network_start(tmp_path: Path) -> None:
    figures = run("network_start", tmp_path, "--rounds", "1")
    assert figures["start_s"].keys() == {"torch", "with our network session"}
    assert figures["read_log_s"]["median"] > 0


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    """A few faults of one family, and what is written of them; `tests/faults` has the others."""
    options = ["--families=signals", "--strategies=ddp", "--scripts", "resumable", f"--folder={tmp_path}/soak"]
    figures = run("soak", tmp_path, "--faults=3", *options)
    assert figures["faults"]["all"]["injected"] >= 3
    assert figures["faults"]["all"]["lost"] == figures["trainings"]["lost"] == 0
    assert sum(figures["places"].values()) == figures["faults"]["all"]["injected"]
    assert sum(each["injected"] for each in figures["scripts"].values()) == figures["faults"]["all"]["injected"]


def test_nccl_gpu(tmp_path: Path) -> None:
    """On the CPU, by gloo; without a GPU and `--smoke` it says what it needs."""
    figures = run("nccl_gpu", tmp_path, "--smoke")
    job = figures["two_processes_on_the_cpu"]
    assert job["exit_codes"] == [0, 0]
    assert job["record"]["right_sum"] is True
    assert job["record"]["network"]["backend"] == "gloo"
    assert (tmp_path / "nccl_gpu.two_processes_on_the_cpu.log").is_file()
    command = [sys.executable, str(BENCHMARKS / "nccl_gpu.py"), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr


def test_on_a_gpu(tmp_path: Path) -> None:
    figures = run("on_a_gpu", tmp_path, "--smoke", "--only", "test_gpu")
    assert {name: each["became"] for name, each in figures.items()} == {"test_gpu": "ok"}


@pytest.mark.root
@pytest.mark.usefixtures("isolated_nodes")
def test_bench_line_rate(tmp_path: Path) -> None:
    figures = run("bench_line_rate", tmp_path, "--rounds=1", "--times=1", "--size=65536")
    assert figures["share_of_line_rate"].keys() == figures["ratio_to_stream"].keys() > {"one TCP stream", "all-reduce"}
    assert figures["ratio_to_stream"]["one TCP stream"]["median"] == 1
    assert figures["target"]["met"].keys() == {"all-reduce", "send-receive"}


@pytest.mark.root
@pytest.mark.usefixtures("isolated_nodes")
def test_breakdown_accuracy(tmp_path: Path) -> None:
    found = run("breakdown_accuracy", tmp_path, "--rounds=1", "--warmup=0", "--rates=10gbit")["10gbit"]
    assert found["share"].keys() == found["points_from_torch.profiler"].keys() > {"communication", "data_wait"}
    assert sum(share["median"] for share in found["share"].values()) == pytest.approx(1, abs=0.01)
    assert found["points_from_reducer"]["count"] == 1


def test_breakdown_overhead(tmp_path: Path) -> None:
    figures = run("breakdown_overhead", tmp_path, "--rounds=1", "--warmup=0", "--steps=100")
    assert figures.keys() == {"1 rank", "2 ranks"}
    for found in figures.values():
        assert found["step_s"].keys() >= {"bare", "bare again", "idle callbacks", "ours", "simple"}
        assert found["added_s"]["bare"] == 0
        assert found["target"]["added_s_at_most"] == 60e-6


@pytest.mark.root
@pytest.mark.usefixtures("isolated_nodes")
def test_slow_ranks(tmp_path: Path) -> None:
    """What is said of so few steps, nobody promises."""
    tiny = ["--trials=1", "--steps=15", "--causes", "link", "--excesses", "0.3"]
    figures = run("slow_ranks", tmp_path, *tiny)
    assert figures["trials"].keys() == figures["step_s"].keys() == {"undisturbed", "link 30%"}
    assert all(sum(said.values()) == 1 for said in figures["trials"].values())


@pytest.mark.root
@pytest.mark.usefixtures("isolated_nodes")
@pytest.mark.skipif(not AZURITE.is_dir(), reason="Azurite is not installed")
def test_stream_rate(tmp_path: Path) -> None:
    figures = run("stream_rate", tmp_path, "--samples=64", "--rounds=1", "--bandwidth=10gbit")
    assert figures["fetched_of_set"]["median"] > 0.9
    assert figures["later_requests"] == 0
    assert figures["targets"].keys() < figures.keys()
    assert figures["MB_per_s"].keys() == {"line", "first", "later", "local", "webdataset"}


def test_cache_hits(tmp_path: Path) -> None:
    figures = run("cache_hits", tmp_path, "--samples=200", "--epochs=2")
    assert [(each["window"], each["ranks"]) for each in figures["cases"]] == [(0, 1), (0, 4), (0.1, 1), (0.1, 4)]
    for each in figures["cases"]:
        assert each["hits"] == pytest.approx(each["of_optimum"] * each["optimum"])


def test_decode_images(tmp_path: Path) -> None:
    figures = run("decode_images", tmp_path, "--rounds=1", "--batch-size=2", "--batches=1")
    assert figures.keys() > {"before", "torchvision", "pillow", "simplejpeg", "pixels, window"}
    assert figures["before"]["to_before"]["median"] == figures["torchvision"]["to_torchvision"]["median"] == 1


def test_head_space(tmp_path: Path) -> None:
    figures = run("head_space", tmp_path, "--rounds=1", "--warmup=0", "--steps=2")
    for name in ("no workers", "two workers"):
        memory_s = figures[name]["memory_s"]["median"]
        assert figures[name]["to_synthetic"]["median"] == pytest.approx(memory_s / figures["synthetic_s"]["median"])


def test_open_index(tmp_path: Path) -> None:
    figures = run("open_index", tmp_path, "--rounds=1", "--samples=2000", "--shards=4")
    assert "index.npz" in figures
    assert all(each.keys() == {"seconds", "added_mb", "process_mb"} for each in figures.values())


def test_tracking_overhead(tmp_path: Path) -> None:
    figures = run("tracking_overhead", tmp_path, "--rounds=1", "--steps=4", "--sleeping-steps=2")
    assert figures.keys() == {f"{kind} step, log every {every}" for kind in ("tiny", "50 ms") for every in (1, 50)}
    for each in figures.values():
        assert each["step_s"].keys() == each["end_of_run_s"].keys() == {"none", "lightning", "ours"}


def test_worker_memory(tmp_path: Path) -> None:
    figures = run("worker_memory", tmp_path, "--epochs=2", "--batches=2")
    assert figures["last_to_second_epoch"] == {"packed": 1, "lists of Python objects": 1}
    assert all(len(each) == 2 and each[0] > 0 for each in figures["megabytes_by_epoch"].values())


@pytest.mark.slow
def test_planned_memory(tmp_path: Path) -> None:
    """A case that was planned is measured later, beside the plan of then."""
    one = ["--models=gpt_tiny", "--strategies=ddp", "--ranks=1"]
    (only_planned,) = run("planned_memory", tmp_path, *one, "--only-plan")["cases"].values()
    assert only_planned[0]["not_measured"]
    figures = run("planned_memory", tmp_path, *one)
    ((row,),) = figures["cases"].values()
    assert row["planned"] == only_planned[0]["planned"] < row["measured"]
    assert row["error"] == pytest.approx(row["planned_peak"] / row["measured_peak"] - 1)
    assert row["model_corrected_on_it"]
    assert figures["largest"]["corrected_on"]["error"] == abs(row["error"])
    assert figures["target"]["error_at_most"] == 0.1


def test_figures(tmp_path: Path) -> None:
    """In a copy of the pages, which it writes as they are."""
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "gpu.md", tmp_path / "docs")
    page = tmp_path / "benchmarks" / "README.md"
    page.write_text(page.read_text().replace("at most 1.01 |", "something else |"))
    start(tmp_path / "benchmarks" / "figures.py")
    for name in ("benchmarks/README.md", "docs/gpu.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
