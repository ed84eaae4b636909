from __future__ import annotations

import pytest

from azureml_strategy.tracking.batch import Metrics, Params, Tags, TextFile, make_batches


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
