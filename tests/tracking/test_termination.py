from __future__ import annotations

import signal
from collections.abc import Callable

from mlflow.tracking import MlflowClient
from tests.preloaded import Forked

from azureml_strategy.tracking import JobMLFlowLogger

RunScript = Callable[..., Forked]

# The interval never ends by itself here: what is in the store was flushed.
LOG = """
import os, signal, sys, time
from azureml_strategy.tracking import JobMLFlowLogger
{before}
logger = JobMLFlowLogger(flush_interval_s=3600)
logger.log_metrics({{"loss": 0.5}}, step=3)
print("ready", flush=True)
{after}
"""
# In short sleeps: a signal that comes right before a sleep is handled after it.
WAIT = """
while True:
    time.sleep(0.05)
"""


def run(run_script: RunScript, before: str = "", after: str = WAIT, terminate: bool = True) -> int:
    process = run_script(LOG.format(before=before, after=after))
    assert process.stdout is not None
    lines = []
    while (line := process.stdout.readline()) != "ready\n":
        assert line, lines
        lines.append(line)
    if terminate:
        process.terminate()
    output, _ = process.communicate(timeout=150)
    assert "Traceback" not in output, output
    return process.returncode


def logged(client: MlflowClient, run_id: str) -> list[float]:
    return [metric.value for metric in client.get_metric_history(run_id, "loss")]


def test_sigterm_outside_fit_writes_and_ends_by_the_signal(
    run_script: RunScript, client: MlflowClient, job_run: str
) -> None:
    assert run(run_script) == -signal.SIGTERM
    assert logged(client, job_run) == [0.5]


def test_the_users_own_handler_stays_in_charge(run_script: RunScript, client: MlflowClient, job_run: str) -> None:
    before = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    assert run(run_script, before=before) == 7
    assert logged(client, job_run) == [0.5]  # at the interpreter's exit


def test_a_forked_child_ends_at_once(run_script: RunScript, client: MlflowClient, job_run: str) -> None:
    after = """
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"forked")  # a signal that comes during a fork is lost
    while True:
        time.sleep(0.05)  # a signal that comes right before a sleep is handled after it
os.read(reader, 6)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM
"""
    assert run(run_script, after=after, terminate=False) == 0


def test_finalize_gives_the_signal_its_default_back(job_run: str, make_logger: Callable[..., JobMLFlowLogger]) -> None:
    logger = make_logger()
    logger.log_metrics({"loss": 0.5})
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    logger.finalize()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
