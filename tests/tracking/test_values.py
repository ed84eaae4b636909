from __future__ import annotations

import contextlib
import math
import warnings
from argparse import Namespace
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

from azureml_strategy.tracking import JobMLFlowLogger
from azureml_strategy.tracking.values import (
    DeviceValue,
    as_number,
    as_step,
    as_texts,
    copy_to_host,
    fit_azure,
    new_params,
)

NUMBERS: list[Any] = [
    *(2, 2.0, np.float16(2), np.float64(2), np.int8(2), np.array(2.0), np.array([2]), np.array([[2.0]])),
    *(torch.tensor(2), torch.tensor([2.0], requires_grad=True), torch.tensor([[2.0]]).bfloat16(), Decimal(2)),
    *(torch.nn.Parameter(torch.tensor(2.0)), Fraction(2)),
]


class Breaks:
    def __float__(self) -> float:
        raise RuntimeError("not now")


class Settings(dict[str, float]):
    __getattr__ = dict.__getitem__


class Lenient(dict[str, float]):
    __getattr__ = dict.get


# By what the warning tells to log instead.
REFUSED: list[tuple[Any, str]] = [
    ("0.5", "use log_tags or log_hyperparams"),
    (b"0.5", "use log_tags"),
    (None, r"leave it out, or log float\('nan'\)"),
    ([1.0], "under a name of its own"),
    ({"a": 1.0}, "under a name of its own"),
    (1j, "its real and imag"),
    (np.complex64(1j), "its real and imag"),
    (torch.tensor(1j), "its real and imag"),
    (torch.ones(2, 3), r"a Tensor of shape \(2, 3\): it has 6 elements; .* its mean"),
    (torch.ones(0), "it has 0 elements"),
    (np.ones(3), r"ndarray of shape \(3,\): it has 3 elements"),
    (np.array("text"), "use log_tags"),
    (np.array([None]), "leave it out"),
    (torch.ones(1, device="meta"), "cannot be read"),
    (10**400, "OverflowError"),
    (Decimal("1e400"), "too large"),
    (object(), "TypeError"),
    (Breaks(), "not now"),
    (Settings(a=1.0), "a Settings: .* under a name of its own"),
    (Lenient(a=1.0), "a Lenient: .* under a name of its own"),
    (Mock(), "a Mock: .*TypeError"),
]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: type(value).__name__)
def test_whatever_holds_one_number_is_one(value: Any) -> None:
    assert type(as_number(value)) is float
    assert as_number(value) == 2.0


def test_a_tensor_may_change_afterwards_and_no_number_is_a_number() -> None:
    tensor = torch.tensor([1.5])
    number = as_number(tensor)
    tensor.zero_()
    assert number == 1.5
    assert [as_number(each) for each in (True, np.bool_(False), math.inf, Decimal("-inf"))] == [
        1,
        0,
        math.inf,
        -math.inf,
    ]
    assert math.isnan(float(as_number(torch.tensor(math.nan))))


def test_a_step_is_an_integer() -> None:
    steps = (3, np.int64(3), torch.tensor(3), 3.0, 3.9, np.float32(3), True, -2, torch.tensor([4.0]))
    assert [as_step(step) for step in steps] == [3, 3, 3, 3, 3, 3, 1, -2, 4]
    for step in ("3", None, math.nan, math.inf, 2**63, [3]):
        with pytest.raises(ValueError, match=r"it |text |log "):
            as_step(step)


def test_one_bad_value_costs_that_value_alone(
    client: MlflowClient, job_run: str, make_logger: Callable[..., JobMLFlowLogger]
) -> None:
    """All in one interval, so in one batch: each bad value, several times, with a good one beside it."""
    logger = make_logger(flush_interval_s=3600)
    for step in range(3):
        for number, (value, _) in enumerate(REFUSED):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                logger.log_metrics({f"bad{number}": value, "good": float(number)}, step=10 * step)
            told = [each for each in caught if f"bad{number}" in str(each.message)]  # others are of any thread
            texts = [str(each.message) for each in told]
            assert len(texts) == (step == 0), "once a metric"
            if told:
                assert told[0].filename == __file__, "where the user called"
                with pytest.warns(UserWarning, match=f"bad{number} .*{REFUSED[number][1]}"):
                    warnings.warn(texts[0], stacklevel=1)
    assert logger.pending_metrics()  # what a checkpoint asks for, while all of it is queued
    assert logger.flush()
    run = client.get_run(job_run)
    assert set(run.data.metrics) == {"good"}
    assert len(client.get_metric_history(job_run, "good")) == 3 * len(REFUSED)


def test_a_bad_step_is_mended_or_costs_its_values(
    client: MlflowClient, job_run: str, make_logger: Callable[..., JobMLFlowLogger]
) -> None:
    logger = make_logger()
    with pytest.warns(UserWarning, match=r"step 2\.5 are logged at step 2"):
        logger.log_metrics({"loss": 1.0}, step=2.5)
    logger.log_metrics({"loss": 1.0}, step=torch.tensor(-4))
    logger = make_logger()
    with pytest.warns(UserWarning, match="loss of step 'last' are left out"):
        logger.log_metrics({"loss": 1.0}, step="last")
    for value, step in enumerate((0, None, 3.0)):
        logger.log_metrics({"other": value}, step=step)
    assert logger.flush()
    assert sorted(metric.step for metric in client.get_metric_history(job_run, "other")) == [0, 0, 3]


def test_numbers_that_are_not_finite_are_kept(
    client: MlflowClient, job_run: str, make_logger: Callable[..., JobMLFlowLogger]
) -> None:
    logger = make_logger()
    logger.log_metrics({"nan": math.nan, "inf": math.inf})
    assert logger.flush()
    metrics = client.get_run(job_run).data.metrics
    assert math.isnan(metrics["nan"])
    assert metrics["inf"] >= 1.7e308  # MLflow's SQL store has no infinity and keeps its largest float


@pytest.mark.cuda
def test_a_gpu_value_is_read_later_and_does_not_change_until_then() -> None:
    tensor = torch.full((1,), 1.5, device="cuda")
    assert float(as_number(tensor)) == 1.5  # CUDA loads a kernel when it is first launched, and may wait for the GPU
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    behind = torch.cuda.Event()
    value = as_number(tensor)
    copy_to_host([value])
    behind.record()
    assert not behind.query()  # nobody waited for the GPU
    tensor.zero_()
    assert float(value) == 1.5


class Stream:
    """A GPU's stream whose work is done when a test says so: what is queued, and how much of it is done."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.done = 0
        self.copies = 0

    def queue(self, work: Any) -> int:
        self.queued.append(work)
        return len(self.queued)

    def run_until(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.queued[self.done - 1]()


class OnGpu(torch.overrides.TorchFunctionMode):
    """Gives tensors of float32 and others a fake GPU's answers: what is computed of them is queued in a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.stack, torch.Tensor.clone, torch.Tensor.to):
            out = func(*args, **{name: each for name, each in (kwargs or {}).items() if name != "non_blocking"}).clone()
            wanted, number = out.clone(), torch.Tensor.to
            out.zero_()  # until the stream comes to it
            source = args[0]

            def work() -> None:
                latest = torch.stack(source) if func is torch.stack else source
                out.copy_(latest.to(out.dtype)) if func is not torch.stack else out.copy_(latest)

            assert wanted.shape == out.shape
            if func is number:
                self.stream.copies += 1
                assert (kwargs or {}).get("non_blocking"), "a copy that waits for the GPU"
            self.stream.queue(work)
            return out
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()

    class Event:
        def record(self) -> None:
            self.at = len(stream.queued)

        def synchronize(self) -> None:
            stream.run_until(self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return stream


def test_the_numbers_of_a_call_are_one_copy_each_kind_behind_which_nothing_is_waited_for(stream: Stream) -> None:
    floats = [torch.tensor(1 / 3), torch.tensor([2.5]), torch.tensor(math.nan)]
    count = torch.tensor(2**53 - 1)
    values = [DeviceValue(each) for each in (floats[0], count, *floats[1:])]
    with OnGpu(stream):
        copy_to_host(values)
        copy_to_host(values)  # they have been
    behind = stream.queue(lambda: pytest.fail("it waits for what was queued after it"))
    assert stream.done == 0
    assert stream.copies == 2
    found = [float(each) for each in values]
    assert found[:3] == [float(floats[0]), 2.0**53 - 1, 2.5]
    assert math.isnan(found[3])
    assert stream.done == behind - 1


def test_a_number_that_changes_after_it_was_logged_is_the_one_that_was_logged(stream: Stream) -> None:
    tensor = torch.tensor(1.5)
    value = DeviceValue(tensor)
    with OnGpu(stream):
        copy_to_host([3.0, value])
    stream.queue(lambda: tensor.zero_())
    assert float(value) == 1.5
    stream.run_until(len(stream.queued))
    assert float(value) == 1.5


def test_nested_long_and_other_types_become_text() -> None:
    params = Namespace(model={"width": 4, "act": None}, shape=(1, 2), note="x" * 300)
    assert as_texts(params) == {"model/width": "4", "model/act": "None", "shape": "(1, 2)", "note": "x" * 250}


def test_no_secret_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "opaque-4711")
    params = {"hub": {"hf_token": "abc", "url": "https://me:pw@host/"}, "list": ["opaque-4711", {"password": 1}]}
    assert as_texts(params) == {
        "hub/hf_token": "<redacted>",
        "hub/url": "https://<redacted>@host/",
        "list": "['<redacted>', {'password': '<redacted>'}]",
    }
    assert as_texts({"max_tokens": 4096, "pad_token": "<pad>"}) == {"max_tokens": "4096", "pad_token": "<pad>"}


def test_only_new_ones_are_left_and_a_changed_one_warns() -> None:
    with pytest.warns(UserWarning, match=r"lr=0\.1 \(now 0\.2\)"):
        assert new_params({"lr": "0.1", "seed": "0"}, {"lr": "0.2", "seed": "0", "depth": "3"}) == {"depth": "3"}


@pytest.mark.filterwarnings("error")
def test_the_same_again_is_silent() -> None:
    assert new_params({"lr": "0.1"}, {"lr": "0.1"}) == {}


def test_azure_takes_two_hundred_a_run() -> None:
    recorded = {f"old{n}": "x" for n in range(190)}
    with pytest.warns(UserWarning, match="the last 5 are not logged, from new10 on"):
        kept = fit_azure(recorded, {f"new{n}": "x" for n in range(15)})
    assert list(kept) == [f"new{n}" for n in range(10)]
