from __future__ import annotations

from collections import Counter

import pytest

from azureml_strategy.gpus import find_gpu
from azureml_strategy.planning.published import PublishedRate, published_latencies, published_rates

# Floating-point operations of training on one sample, from the papers: three times those of a forward pass, in which a
# multiplication with its addition is two. BERT and GPT: six for each parameter and token.
_RESNETS = {
    "resnet18": 1.8,
    "resnet34": 3.6,
    "resnet50": 4.1,
    "resnet101": 7.8,
    "resnet152": 11.5,
    "convnext_tiny": 4.5,
}
_VITS = {"vit_small_patch16_224": 4.6, "vit_base_patch16_224": 17.5, "vit_large_patch16_224": 61.6}
_PARAMETERS = {"bert-base": 0.110, "bert-large": 0.336, "gpt2-124M": 0.124}
_KINDS = {"32-true": "32", "tf32": "tf32", "16-mixed": "16", "16-true": "16", "bf16-mixed": "bf16"}


def tera_flops(entry: PublishedRate) -> float:
    """TFLOP/s that the rate stands for."""
    if entry.unit == "TFLOP/s":
        return entry.rate
    assert entry.network is not None
    if entry.unit == "images/s":
        return entry.rate * 6 * (_RESNETS | _VITS)[entry.network] / 1e3
    tokens = entry.rate * (entry.sequence_length or 0 if entry.unit == "sequences/s" else 1)
    return tokens * 6 * _PARAMETERS[entry.network] / 1e3


@pytest.mark.parametrize("entry", published_rates(), ids=lambda entry: f"{entry.network or entry.kind}-{entry.gpu}")
def test_each_has_a_source_and_a_gpu(entry: PublishedRate) -> None:
    assert len(entry.source) > 20
    assert 2014 <= entry.year <= 2026
    assert find_gpu(entry.gpu) is not None
    assert entry.framework
    assert entry.kind != "train" or entry.network


@pytest.mark.parametrize(
    "entry",
    [entry for entry in published_rates() if entry.kind != "copy"],
    ids=lambda entry: f"{entry.network or entry.kind}-{entry.gpu}-{entry.precision}-{entry.batch}",
)
def test_no_rate_is_above_the_peak(entry: PublishedRate) -> None:
    """A rate in the wrong unit, of several GPUs or of another precision would be, or be next to nothing."""
    gpu = find_gpu(entry.gpu)
    assert gpu is not None
    peak = gpu.peaks[_KINDS[entry.precision or ""]]  # type: ignore[index]
    # At 1 image a launch, a GPU mostly waits.
    lowest = 0.05 if (entry.batch or 32) > 8 or entry.kind == "gemm" else 0.03
    assert lowest < tera_flops(entry) / peak < 1


def test_copies_are_below_the_bandwidth() -> None:
    copies = [entry for entry in published_rates() if entry.kind == "copy"]
    assert {entry.unit for entry in copies} == {"GB/s"}
    for entry in copies:
        gpu = find_gpu(entry.gpu)
        assert gpu is not None
        assert 0.7 < entry.rate / gpu.memory_bandwidth < 0.95, entry


def test_units_fit_the_kinds() -> None:
    units = {"train": {"images/s", "sequences/s", "tokens/s"}, "gemm": {"TFLOP/s"}, "copy": {"GB/s"}}
    for entry in published_rates():
        assert entry.unit in units[entry.kind]
        assert (entry.image_size is not None) == (entry.unit == "images/s")
        assert (entry.sequence_length is not None) == (entry.unit in ("sequences/s", "tokens/s"))


def test_what_predictions_are_judged_on_is_kept_out() -> None:
    for entry in published_rates():
        gpu = find_gpu(entry.gpu)
        assert gpu is not None
        assert gpu.year < 2023, entry
        assert gpu.model not in ("H100", "H200"), entry


def test_a_note_of_its_own_comes_before_that_of_its_group() -> None:
    (entry,) = (each for each in published_rates() if each.rate == 175_000)
    assert entry.note.startswith("93 ms; ")
    assert entry.note.endswith("title has")


def test_a_larger_batch_is_faster() -> None:
    """MXNet's tables: one GPU, one network, growing batch."""
    tables = Counter(entry.gpu for entry in published_rates() if entry.framework.startswith("MXNet"))
    assert set(tables) == {"K80", "M60", "V100 SXM2 16GB"}
    for gpu in tables:
        entries = [each for each in published_rates() if each.framework.startswith("MXNet") and each.gpu == gpu]
        rates = [each.rate for each in sorted(entries, key=lambda each: each.batch or 0)]
        assert rates == sorted(rates)


def test_latencies() -> None:
    found = {(each.link, each.algorithm): each for each in published_latencies()}
    assert len(found) == len(published_latencies()) == 8
    for algorithm in ("ring", "tree"):
        steps = [found[link, algorithm] for link in ("nvlink", "pcie", "network")]
        for protocol in ("ll", "ll128", "simple"):
            values = [getattr(each, protocol) for each in steps]
            assert values == sorted(values)
            assert 0.1 < values[0] <= values[-1] < 100  # microseconds
    assert all("tuning.cc" in each.source for each in published_latencies())
