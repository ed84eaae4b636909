"""A fault of our own callbacks, on one rank, is a warning: no rank fails for it, and none waits."""

from __future__ import annotations

from tests.multiprocess.conftest import RunJob

from azureml_strategy.cluster.environ import HANG_WATCH_SWITCH, NETWORK_RECORD_SWITCH, TERMINATION_SWITCH

# what fails: (the hook that is named, the switch)
FAULTS = {
    "this_process": ("HangWatch.setup", HANG_WATCH_SWITCH),
    "_start": ("HangWatch.setup", HANG_WATCH_SWITCH),
    "batch_done": ("HangWatch.on_train_batch_end", HANG_WATCH_SWITCH),
    "_prepare": ("TerminateTogether.setup", TERMINATION_SWITCH),
    "_poller": ("TerminateTogether.on_train_start", TERMINATION_SWITCH),
    "step_done": ("TerminateTogether.on_step_boundary", TERMINATION_SWITCH),
    "run_network": ("NetworkRecorder.setup", NETWORK_RECORD_SWITCH),
}


def test_every_fit_trains_to_its_end(run_job: RunJob) -> None:
    job = run_job("faulty_callbacks.py", nodes=2)
    assert job.exit_code == 0, job.output
    assert job.each("steps") == [dict.fromkeys(FAULTS, 4)] * 2, job.output
    for hook, switch in FAULTS.values():
        assert f"{hook} of azureml-strategy has failed." in job.output, hook
        assert f"{switch}=off" in job.output
    assert "RuntimeError: a fault of ours" in job.output
    assert "holds up the others" not in job.output
