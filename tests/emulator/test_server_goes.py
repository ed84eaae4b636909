"""The job's MLflow server ends in the middle: the job's own exit code stays, and nothing is lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.preloaded import Forked
from tests.tracking.server import Server

from azureml_strategy.cli import main
from azureml_strategy.emulator import EmulatedJob, EmulationError, emulate

SCRIPT = """
import sys, time
from pathlib import Path
from azureml_strategy.tracking import JobMLFlowLogger

logger = JobMLFlowLogger(flush_interval_s=0.05)
logger.log_metrics({"loss": 0.0}, 0)
assert logger.flush()
print("RUNNING", flush=True)
while not Path("go-on").exists():
    time.sleep(0.05)
for step in range(1, 300):
    logger.log_metrics({"loss": float(step)}, step)
logger.finalize()
sys.exit(3)
"""


def test_the_exit_code_is_the_jobs_and_the_rest_is_sent_by_the_printed_command(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, store.tracking_uri)
    server.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = str(Path(sys.executable).with_name("azureml-strategy"))
    emulator = Forked([command, "emulate", "--", "python", str(script)], os.environ, text=True)
    lines = []
    while "RUNNING" not in (line := emulator.stdout.readline()):
        lines.append(line)
        assert line, lines
    server.stop()
    (tmp_path / "go-on").touch()
    output, _ = emulator.communicate(timeout=150)  # MLflow's own patience is four minutes for each request
    assert emulator.returncode == 3, output
    command = f"azureml-strategy jobs upload-metrics {tmp_path}"
    assert command in output
    server.start()
    assert main(command.split()[1:]) == 0
    (experiment,) = store.search_experiments(filter_string="name = 'emulated'")
    (run,) = store.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert [metric.step for metric in store.get_metric_history(run.info.run_id, "loss")] == list(range(300))
    server.stop()
    with pytest.raises(EmulationError, match=f"No run can be opened in {server.uri}"):
        emulate(EmulatedJob(["true"]))
