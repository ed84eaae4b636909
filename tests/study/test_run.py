"""Studies of emulated jobs, of runs that exist, and of jobs submitted to the loopback Azure, with their runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.jobs.azure_service.exchange import Reply, Request
from tests.jobs.azure_service.service import AzureService
from tests.preloaded import start_forked
from tests.study.conftest import MakeRun, rename_run
from tests.training.conftest import MATRIX

from azureml_strategy.cli import main
from azureml_strategy.study import StudyOptions
from azureml_strategy.study.run import threads_per_process

TINY = (
    *(*MATRIX, "data.image_size=32", "data.batch_size=2"),
    *("tracking.throughput.warmup_steps=1", "trainer.precision=32-true"),
)


@pytest.mark.slow
def test_two_sizes(store: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    arguments = ["resnet50_synthetic", "--nodes", "1,2", "--local", "--steps", "4", *TINY]
    assert main(["study", *arguments, "tracking.cost.price_per_hour=3.6"]) == 0
    output = capsys.readouterr().out
    assert output.index("\n1 node\n") < output.index("\n2 nodes\n")
    assert "Emulated: all nodes share this machine's" in output
    runs = json.loads(Path("outputs/study.json").read_text())["runs"]
    assert [(run["nodes"], run["devices"], run["transport"], run["problem"]) for run in runs] == [
        (1, 1, "gloo", ""),
        (2, 2, "gloo", ""),
    ]
    assert all(run["samples_per_second"] > 0 and run["unit"] == "images" for run in runs)
    assert runs[0]["efficiency"] == 1.0
    assert runs[1]["efficiency"] == pytest.approx(runs[1]["speed_up"] / 2)
    assert [run["cost_per_million_samples"] for run in runs] == pytest.approx(
        [1e6 * run["nodes"] * 0.001 / run["samples_per_second"] for run in runs]
    )
    assert Path("outputs/study.png").read_bytes().startswith(b"\x89PNG")
    assert {store.get_run(run["run_id"]).info.status for run in runs} == {"FINISHED"}


def test_a_process_computes_with_as_many_threads_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS")
    options = StudyOptions(recipe="r", nodes=[1, 2], processes_per_node=2, local=True)
    assert threads_per_process(options) == "4"
    assert threads_per_process(StudyOptions(recipe="r", nodes=[64], local=True)) == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_process(options) == "3"


def table(output: str) -> list[list[str]]:
    """Heading and rows of what is printed."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("| ")]


def test_existing_runs(make_run: MakeRun, store: MlflowClient, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(1, 1000.0), make_run(2, 1800.0, network_transport="socket")
    store.log_metric(two, "summary/mfu", 0.31)
    assert main(["study", "--runs", f"{two},{one}", "--price-per-hour", "36"]) == 0
    output = capsys.readouterr().out
    heading, *rows = table(output)
    assert heading == [
        *("nodes", "devices", "images/s", "per device", "speed-up", "efficiency", "MFU", "USD per 10^6 images"),
        "transport",
    ]
    assert rows == [
        ["1", "2", "1,000.0", "500.0", "1.00", "100.0%", "-", "10.00", "ib"],
        ["2", "4", "1,800.0", "450.0", "1.80", "90.0%", "31%", "11.11", "socket"],
    ]
    assert f"Runs, from above: {one},{two}" in output
    assert "against the smallest, 2 devices" in output
    assert "Emulated" not in output
    written = json.loads(Path("outputs/study.json").read_text())
    assert written["base"] == one
    assert [run["efficiency"] for run in written["runs"]] == [1.0, 0.9]
    assert written["runs"][1]["samples_per_second_per_device"] == 450.0
    assert Path("outputs/study.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_failed_and_one_that_measured_nothing(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(1, 10.0, params={"x": "1"}), make_run(2, None, status="FAILED"), make_run(4, None)]
    assert main(["study", "--runs", ",".join(runs), "--output", "a/b.json", "--plot", "c/d.png"]) == 1
    output = capsys.readouterr().out
    assert "failed" in output
    assert "no throughput" in output
    assert "No cost: no run knows a price" in output
    assert "Written: a/b.json, c/d.png" in output
    assert Path("a/b.json").exists()
    assert Path("c/d.png").exists()


def test_the_runs_own_cost_and_older_runs(
    make_run: MakeRun, store: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(1, 10.0, cost_currency="EUR")
    store.log_metric(run, "cost/per_million_samples", 0.25)
    older = store.create_run("0").info.run_id  # before nodes and devices were recorded
    store.log_metric(older, "summary/samples_per_second", 40.0)
    store.log_metric(older, "summary/samples_per_second_per_device", 5.0)
    store.set_tag(older, "throughput.unit", "images")
    store.set_terminated(older)
    assert main(["study", "--runs", f"{run},{older}", "--store", store.tracking_uri]) == 0
    heading, *rows = table(capsys.readouterr().out)
    assert "EUR per 10^6 images" in heading
    assert sorted(row[1] for row in rows) == ["2", "8"]
    assert sorted(row[heading.index("EUR per 10^6 images")] for row in rows) == ["-", "0.25"]


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store = "http://user:password@127.0.0.1:1"  # where nobody listens
    assert main(["study", "--runs", "a", "--store", store]) == 2
    told = capsys.readouterr().err
    assert told.startswith("azureml-strategy: The store did not give run a: ")
    assert told.count("\n") == 1
    assert "password" not in told


def test_refuses_a_run_that_the_store_has_not(store: MlflowClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "--runs", "nobody"]) == 2
    assert "The store has no run nobody. Name the one that has it with --store" in capsys.readouterr().err


def test_a_missing_picture_library_is_said_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("azureml_strategy.lazy.find_spec", lambda name: None)
    monkeypatch.setattr("azureml_strategy.study.run.emulate_sizes", lambda options: pytest.fail("a run was started"))
    assert main(["study", "resnet50_synthetic", "--nodes", "1,2", "--local", *TINY]) == 2
    assert "Type: pip install -c constraints.txt '.[report]'" in capsys.readouterr().err


RECIPE = ["resnet50_synthetic", "cluster=nd96isr_h100_v5", "cluster.price_per_hour=36"]


@pytest.fixture
def tracked(azure_service: AzureService, store: MlflowClient, make_run: MakeRun, tmp_path: Path) -> AzureService:
    """Each job that is created leaves a run: 1,000 images a second on one node, and 90 % of perfect scaling."""
    azure_service.workspace.properties["mlFlowTrackingUri"] = store.tracking_uri
    azure_service.jobs.states = ("Completed",)  # nobody waits
    made: set[str] = set()

    def manage(request: Request) -> Reply:
        reply = azure_service.manage(request)
        name = request.path.rpartition("/jobs/")[2]
        if request.method == "PUT" and name in azure_service.jobs and name not in made:
            made.add(name)
            nodes = request.json["properties"]["resources"]["instanceCount"]
            rename_run(tmp_path / "mlflow.db", make_run(nodes, 1000.0 * nodes * (0.9 if nodes > 1 else 1)), name)
        return reply

    azure_service.hosts["management.azure.com"] = manage
    return azure_service


def test_all_sizes_are_submitted_then_waited_for(tracked: AzureService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *RECIPE, "--nodes", "1,4", "--steps", "60", "--price-per-hour", "36"]) == 0
    output = capsys.readouterr().out
    bodies = [tracked.jobs[name].body["properties"] for name in tracked.jobs]
    assert [body["resources"]["instanceCount"] for body in bodies] == [1, 4]
    for body in bodies:
        assert "trainer.max_steps=60" in body["command"]
        assert "trainer.limit_val_batches=0" in body["command"]
        assert body["environmentVariables"]["AZUREML_STRATEGY_PRICE_PER_HOUR"] == "36.0"
    for name in tracked.jobs:
        assert f"job {name}, https://ml.azure.com/runs/{name}" in output
        assert f"{name}: Completed" in output
    assert f"azureml-strategy study --runs {','.join(tracked.jobs)} --store azureml" in output
    runs = json.loads(Path("outputs/study.json").read_text())["runs"]
    assert [(run["nodes"], run["efficiency"]) for run in runs] == [(1, 1.0), (4, pytest.approx(0.9))]
    assert main(["study", "--runs", ",".join(tracked.jobs), "--store", "azureml"]) == 0
    assert "90.0%" in capsys.readouterr().out


def test_nothing_is_submitted_unless_all_sizes_can_be(
    tracked: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    ethernet = ["resnet50_synthetic", "cluster=nc24ads_a100_v4", "--nodes", "1,2"]
    assert main(["study", *ethernet]) == 2
    assert "cluster.allow_ethernet=true" in capsys.readouterr().err
    assert main(["study", *RECIPE, "--nodes", "1,2", "cluster.num_nodes=2"]) == 2
    assert "--nodes names them all" in capsys.readouterr().err
    assert len(tracked.jobs) == 0
