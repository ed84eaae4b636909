from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import _validate_metric

from azureml_strategy.tracking import JobMLFlowLogger
from azureml_strategy.tracking.batch import Metrics, Params, Tags, TextFile, clean_name, make_batches


def test_batches_keep_azures_limits_and_the_order() -> None:
    records = [Metrics({f"m{n}": float(n) for n in range(30)}, step, 0) for step in range(20)]
    records.append(Params({f"p{n}": "x" for n in range(250)}))
    batches = make_batches(records)
    assert [(batch.kind, len(batch.items)) for batch in batches] == [
        *[("params", 100), ("params", 100), ("params", 50)],
        *[("metrics", 200), ("metrics", 200), ("metrics", 200)],
    ]
    metrics = [item for batch in batches if batch.kind == "metrics" for item in batch.items]
    assert [(item.key, item.step) for item in metrics[28:32]] == [("m28", 0), ("m29", 0), ("m0", 1), ("m1", 1)]


def test_a_value_that_cannot_be_read_any_more_is_left_out_alone() -> None:
    class Lost:
        def __float__(self) -> float:
            raise RuntimeError("the GPU has failed")

    with pytest.warns(UserWarning, match="lost of step 7 .* the GPU has failed"):
        (batch,) = make_batches([Metrics({"loss": 0.5, "lost": Lost(), "n": 3}, 7, 123)])
    assert [(m.key, m.value, m.step, m.timestamp) for m in batch.items] == [("loss", 0.5, 7, 123), ("n", 3.0, 7, 123)]


def test_tags_come_first_and_files_alone() -> None:
    records = [TextFile("a.json", "{}"), Tags({f"t{n}": "x" * 2000 for n in range(120)}), TextFile("b.json", "[]")]
    batches = make_batches([Metrics({"m": 1.0}, 0, 0), *records])
    assert [(batch.kind, len(batch.items)) for batch in batches] == [
        *[("tags", 100), ("tags", 20)],
        ("metrics", 1),
        *[("files", 1), ("files", 1)],
    ]
    assert {len(tag.value) for tag in batches[0].items} == {1000}  # Azure ML takes no longer one


# Characters that the rule is about come often.
_NAMES = st.text(st.sampled_from("_x40f-/.@% :") | st.characters(codec="utf-8"), max_size=40)


def _original(clean: str) -> str:
    """What the documentation says a logged name means."""
    return "" if clean == "_x-" else re.sub(r"_x([0-9a-f]+)-", lambda found: chr(int(found[1], 16)), clean)


@pytest.mark.filterwarnings("ignore:MLflow does not take the name")
@given(_NAMES)
def test_every_name_is_taken_and_can_be_read_back(name: str) -> None:
    clean = clean_name(name)
    _validate_metric(clean, 1.0, 0, 0)
    if len(clean) < 250:
        assert _original(clean) == name


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["val/top-1 acc.b_c", "loss_x-axis", "a.b/..c", "准确率", "größe/é", "..."])
def test_names_that_mlflow_takes_stay(name: str) -> None:
    assert clean_name(name) == name


@pytest.mark.filterwarnings("ignore:MLflow does not take the name")
def test_long_names_stay_different() -> None:
    names = [f"{'long/' * 60}{end}" for end in "abc"]
    cleaned = {clean_name(name) for name in names}
    assert len(cleaned) == 3
    assert {len(name) for name in cleaned} == {250}


def test_different_names_are_different_metrics_and_are_warned_of_once(
    client: MlflowClient, job_run: str, make_logger: Callable[..., JobMLFlowLogger]
) -> None:
    logger = make_logger(prefix="p")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            logger.log_metrics({"hit@1": 1.0, "hit1": 2.0, "准确率": 3.0, "损失": 4.0, "//": 5.0}, step)
    changed = [str(each.message) for each in caught if "MLflow does not take" in str(each.message)]
    assert changed == [
        "MLflow does not take the name 'p-hit@1'; it is logged as 'p-hit_x40-1'.",
        "MLflow does not take the name 'p-//'; it is logged as 'p-/_x2f-'.",
    ]
    with pytest.warns(UserWarning, match="'tag: one'"):
        logger.log_tags({"tag: one": "1"})
    with pytest.warns(UserWarning, match=r"'lr\[0\]'"):
        logger.log_hyperparams({"lr[0]": 1})
    assert logger.flush()
    data = client.get_run(job_run).data
    assert data.metrics == {"p-hit_x40-1": 1.0, "p-hit1": 2.0, "p-准确率": 3.0, "p-损失": 4.0, "p-/_x2f-": 5.0}
    assert data.tags["tag_x3a- one"] == "1"
    assert data.params == {"lr_x5b-0_x5d-": "1"}
