from __future__ import annotations

from argparse import Namespace

import pytest

from azureml_strategy.tracking.hyperparams import as_texts, fit_azure, new_params


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
