"""Real recordings by torch.profiler, in one process."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from mlflow import MlflowClient
from tests.tracking.conftest import TinyModel, _empty_store, store
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.lightning_internals import logged_step
from azureml_strategy.profiling import ProfileSteps, writer
from azureml_strategy.profiling.request import ProfileRequestError
from azureml_strategy.tracking import JobMLFlowLogger, ThroughputCallback

__all__ = ["_empty_store", "store"]  # fixtures


class At(Callback):
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if logged_step(trainer) == self.step:
            self.action()


class AsksFor(Callback):
    """Asks for profiles, one after the other, each at its step, and waits for the answers."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.answers = list(texts), list[str]()
        self.deadline = time.monotonic() + 100

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if len(self.answers) == len(self.texts):
            trainer.should_stop = True
        elif Path("profile.answer").exists():
            self.answers.append(Path("profile.answer").read_text())
            Path("profile.answer").unlink()
            Path("profile.taken").unlink()
        elif not Path("profile.request").exists() and not Path("profile.taken").exists():
            Path("profile.request").write_text(self.texts[len(self.answers)])
        time.sleep(0.005)
        assert time.monotonic() < self.deadline


def fit(*callbacks: Callback, steps: int = 10, model: TinyModel | None = None, **arguments: Any) -> Trainer:
    path = arguments.pop("ckpt_path", None)
    quiet = {"accelerator": "cpu", "max_steps": steps, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "logger": False, "default_root_dir": Path.cwd(), "max_epochs": -1}
    trainer = Trainer(callbacks=list(callbacks), **{**quiet, **arguments})
    trainer.fit(model or TinyModel(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4), ckpt_path=path)
    return trainer


def traced(steps: str, rank: int = 0) -> Counter[str]:
    """How often each name is in a trace."""
    with gzip.open(f"profile/trace_rank_{rank}_{steps}.json.gz") as file:
        return Counter(each["name"] for each in json.load(file)["traceEvents"] if each.get("ph") == "X")


def marks(names: Counter[str]) -> list[int]:
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def test_the_steps_of_the_optimizer_are_recorded() -> None:
    fit(ProfileSteps("2-4", on_request=False), accumulate_grad_batches=2)
    names = traced("steps_2-4")
    assert marks(names) == [2, 3, 4]
    assert names["Optimizer.step#SGD.step"] == 3
    assert names["aten::linear"] == 6
    summary = json.loads(Path("profile/summary_rank_0.json").read_text())
    assert summary["steps"] == [2, 3, 4]
    assert sum(each["calls"] for each in summary["operators"] if each["name"] == "aten::addmm") == 6
    assert not Path("profile/trace_rank_0_steps_2-4.json").exists()


def test_the_first_step_alone() -> None:
    fit(ProfileSteps(0, on_request=False), steps=3)
    assert marks(traced("step_0")) == [0]


def test_shapes_stacks_and_memory() -> None:
    fit(ProfileSteps("1", shapes=True, stacks=True, memory=True, on_request=False), steps=3)
    with gzip.open("profile/trace_rank_0_step_1.json.gz") as file:
        trace = json.load(file)
    (linear,) = [each for each in trace["traceEvents"] if each["name"] == "aten::linear"]
    assert linear["args"]["Input Dims"][0] == [4, 4]
    assert {each.get("cat") for each in trace["traceEvents"]} >= {"python_function"}
    assert any(each["name"] == "[memory]" for each in trace["traceEvents"])


def test_it_is_kept_with_the_run(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = JobMLFlowLogger(tracking_uri=store, artifact_location=Path("files").absolute().as_uri())
    fit(ProfileSteps("2-3", on_request=False), logger=logger)
    client = MlflowClient(store)
    path = "profile/trace_rank_0_steps_2-3.json.gz"
    assert [each.path for each in client.list_artifacts(logger.run_id, "profile")] == [
        "profile/summary_rank_0.json",
        path,
    ]
    assert Path(client.download_artifacts(logger.run_id, path)).read_bytes() == Path(path).read_bytes()
    events = Path(client.download_artifacts(logger.run_id, "events/attempt_0.jsonl")).read_text()
    assert "steps 2-3 profiled on rank(s) 0" in events
    printed = capsys.readouterr().out
    assert "Profile of steps 2-3 on rank 0" in printed
    assert "communication, exposed" in printed


def test_a_large_trace_stays_on_disk(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_UPLOADED_BYTES", 2_500)
    logger = JobMLFlowLogger(tracking_uri=store, artifact_location=Path("files").absolute().as_uri())
    asked = AsksFor(["steps=1"])
    fit(ProfileSteps(), asked, steps=-1, logger=logger)
    assert "stays there: it has more than" in asked.answers[0]
    assert [each.path for each in MlflowClient(store).list_artifacts(logger.run_id, "profile")] == [
        "profile/summary_rank_0.json"
    ]


def test_steps_that_are_never_reached(caplog: pytest.LogCaptureFixture) -> None:
    fit(ProfileSteps("20-25"), steps=5)
    assert "steps 20-25 were never reached" in caplog.text
    assert not Path("profile").exists()


def test_a_training_that_ends_within_the_steps() -> None:
    fit(ProfileSteps("3-8", on_request=False), steps=5)
    assert marks(traced("steps_3-4")) == [3, 4, 5]  # torch marks the end of the training as a step
    assert json.loads(Path("profile/summary_rank_0.json").read_text())["steps"] == [3, 4]


def test_a_training_that_ends_within_the_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    fit(ProfileSteps("5-8", on_request=False), steps=5)
    assert "steps 5-8 were never reached" in caplog.text
    assert not torch.autograd.profiler._is_profiler_enabled
    fit(ProfileSteps("1-2", on_request=False), steps=5)
    assert marks(traced("steps_1-2")) == [1, 2]


def test_a_training_that_resumes_within_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    fit(steps=4).save_checkpoint("four.ckpt")
    fit(ProfileSteps("2-6", on_request=False), ckpt_path="four.ckpt")
    assert marks(traced("steps_4-6")) == [4, 5, 6]
    fit(ProfileSteps("1-2", on_request=False), ckpt_path="four.ckpt")
    assert "steps 1-2 were never reached, this training begins at step 4" in caplog.text


def test_an_exception_within_the_steps() -> None:
    def fail() -> None:
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        fit(At(4, fail), ProfileSteps("3-8", on_request=False))
    assert marks(traced("steps_3-4")) == [3, 4]
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize("others", [[], [ThroughputCallback]], ids=["alone", "behind the breakdown's"])
def test_lightnings_profiler_is_left_alone(caplog: pytest.LogCaptureFixture, others: list[type[Callback]]) -> None:
    own = PyTorchProfiler(dirpath=".", filename="own", schedule=None, export_to_chrome=False, row_limit=-1)
    trainer = fit(ProfileSteps("2-4"), *(each() for each in others), profiler=own)
    assert trainer.global_step == 10
    assert "Rank 0 does not profile steps 2-4: the Trainer has profiler='pytorch'" in caplog.text
    assert "aten::addmm" in Path("fit-own.txt").read_text()


@pytest.mark.parametrize("first", [1, 4], ids=["within the warm-up", "within the steps"])
def test_a_profiler_that_begins_meanwhile_goes_on(first: int, caplog: pytest.LogCaptureFixture) -> None:
    own = profile(activities=[ProfilerActivity.CPU])
    fit(At(first, own.start), At(8, own.stop), ProfileSteps("2-6", on_request=False))
    assert "Rank 0 does not profile steps 2-6: " in caplog.text
    assert "another torch.profiler was started meanwhile" in caplog.text
    counts = {each.key: each.count for each in own.key_averages()}
    assert counts["aten::addmm"] == 8 - first
    # A span of the lost recording that ends or begins now would be written into memory that torch has freed.
    assert not [name for name in counts if name.startswith("ProfilerStep")]
    assert not Path("profile").exists()


def test_requests_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked = AsksFor(["steps=2", "steps=nonsense", "ranks=1", "steps=1 shapes=true"])
    fit(ProfileSteps(), asked, steps=-1)
    done, unclear, missing, again = asked.answers
    assert done.startswith("steps ")
    assert unclear.startswith("refused: steps=nonsense: in a request, steps is how many")
    assert missing.startswith("refused: ranks=1: there is no rank 1.")
    assert again.startswith("step ")
    assert len(list(Path("profile").glob("trace_rank_0_*.json.gz"))) == 2


def test_a_request_near_to_planned_steps_is_refused() -> None:
    asked = AsksFor(["steps=1000"])
    fit(ProfileSteps("1000-1001"), asked, steps=-1)
    assert "refused: steps 1000-1001 are to be profiled, too near to steps" in asked.answers[0]


def test_a_request_that_comes_too_late() -> None:
    fit(At(8, lambda: (Path("profile.request").write_text(""), time.sleep(2.5))), ProfileSteps(), steps=10)
    assert Path("profile.answer").read_text().startswith("refused: ")


def test_ranks_that_do_not_exist() -> None:
    with pytest.raises(MisconfigurationException, match="profile: ranks=0,8: there is no rank 8"):
        fit(ProfileSteps("2-4", ranks="0,8"))


def test_nothing_happens_without_steps_and_requests() -> None:
    fit(ProfileSteps(on_request=False))
    assert not Path("profile").exists()


def test_a_second_fit_leaves_the_first_ones_trace() -> None:
    for batches in (1, 2):
        fit(ProfileSteps(1, on_request=False), steps=3, accumulate_grad_batches=batches)
    assert [traced(each)["aten::linear"] for each in ("step_1", "step_1_2")] == [1, 2]


def test_summaries_do_not_get_mixed_up(capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProfileSteps("1-4", on_request=False), ProfileSteps("6-7", on_request=False))
    printed = capsys.readouterr().out
    assert "Profile of steps 1-4 " in printed
    assert "Profile of steps 6-7 " in printed


def test_a_training_may_be_copied_while_it_is_profiled() -> None:
    profiling = ProfileSteps("1-3")
    copies: list[ProfileSteps] = []
    fit(profiling, At(2, lambda: copies.append(pickle.loads(pickle.dumps(copy.deepcopy(profiling))))), steps=5)
    (copied,) = copies
    fit(copied, steps=5)
    assert marks(traced("steps_1-3")) == marks(traced("steps_1-3_2")) == [1, 2, 3]


@pytest.mark.parametrize("name", ["usr2", "SIGKILL", ""])
def test_a_signal_that_there_is_not(name: str) -> None:
    with pytest.raises(ProfileRequestError, match="is no signal that a process can catch"):
        ProfileSteps(signal=name)
