from __future__ import annotations

import inspect

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from azureml_strategy.strategies.compression import communication_hook, on_any_backend


def test_half_precision_needs_no_state() -> None:
    assert communication_hook("bf16") == (None, default_hooks.bf16_compress_hook)
    assert communication_hook("fp16") == (None, default_hooks.fp16_compress_hook)


def test_powersgd_keeps_its_error_and_starts_exactly() -> None:
    state, hook = communication_hook("powersgd", rank=3)
    assert hook is powerSGD_hook.powerSGD_hook
    assert isinstance(state, powerSGD_hook.PowerSGDState)
    assert (state.matrix_approximation_rank, state.use_error_feedback, state.start_powerSGD_iter) == (3, True, 10)


@pytest.mark.parametrize(
    ("compression", "rank", "words"),
    [("fp8", 1, "'fp8' is unknown. Choose 'bf16', 'fp16' or 'powersgd'"), ("powersgd", 0, "powersgd_rank=0")],
)
def test_what_is_refused(compression: str, rank: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        communication_hook(compression, rank)


def test_the_hook_in_disguise_does_the_same_under_a_name_that_torch_lets_through() -> None:
    hook = on_any_backend(lambda state, bucket: (state, bucket))
    assert hook("state", "bucket") == ("state", "bucket")
    disguised = on_any_backend(default_hooks.bf16_compress_hook)
    assert disguised.__name__ == "hook_on_any_backend"
    assert disguised.__qualname__ == "bf16_compress_hook"
    assert not inspect.get_annotations(disguised)
