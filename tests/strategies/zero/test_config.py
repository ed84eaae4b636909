from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from azureml_strategy.strategies.zero.config import TrainerNumbers, agree

TRAINER = TrainerNumbers(
    accumulate_grad_batches=4, gradient_clip_val=0.5, precision="bf16-mixed", batch_size=8, data_parallel_size=2
)


@given(
    accumulate=st.integers(1, 64), batch=st.integers(1, 512), replicas=st.integers(1, 4096), said=st.sets(st.integers())
)
def test_numbers_that_repeat_the_trainers_are_taken(accumulate: int, batch: int, replicas: int, said: set[int]) -> None:
    trainer = replace(TRAINER, accumulate_grad_batches=accumulate, batch_size=batch, data_parallel_size=replicas)
    config: dict[str, Any] = {
        "gradient_accumulation_steps": accumulate,
        "train_micro_batch_size_per_gpu": batch,
        "train_batch_size": accumulate * batch * replicas,
    }
    expected = {"train_micro_batch_size_per_gpu": batch, "zero_allow_untested_optimizer": True}
    assert agree(config, trainer) == expected
    for key, value in config.items():
        for other in said - {value}:
            with pytest.raises(MisconfigurationException, match=f"says {key}={other}, but {value} comes from"):
                agree({**config, key: other}, trainer)


def test_a_configuration_of_hugging_face_with_auto_everywhere() -> None:
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    agreed = agree(config, TRAINER)
    assert agreed == {
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
    }
    assert config["bf16"] == {"enabled": "auto"}, "the user's own stays as it is"


def test_the_configuration_clips_where_the_trainer_does_not() -> None:
    trainer = replace(TRAINER, gradient_clip_val=None)
    assert agree({"gradient_clipping": 1.0}, trainer)["gradient_clipping"] == 1.0
    assert "gradient_clipping" not in agree({"gradient_clipping": "auto"}, trainer)
    with pytest.raises(ValueError, match=r"gradient_clipping=1.0, but 0.5 comes from Trainer\(gradient_clip_val=0.5\)"):
        agree({"gradient_clipping": 1.0}, TRAINER)


@pytest.mark.parametrize(
    ("config", "precision", "words"),
    [
        ({"fp16": {"enabled": True}}, "bf16-mixed", r"Write Trainer\(precision='16-mixed'\)"),
        ({"bf16": {"enabled": True}}, "32-true", r"Write Trainer\(precision='bf16-mixed'\)"),
        ({"bf16": {"enabled": False}}, "bf16-true", r"Write Trainer\(precision='32-true'\)"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "32-true", r"optimizer.params.lr='auto'"),
        ({"scheduler": {"params": {"warmup_num_steps": "auto"}}}, "32-true", "scheduler.params.warmup_num_steps"),
    ],
)
def test_what_is_refused(config: dict[str, Any], precision: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        agree(config, replace(TRAINER, precision=precision))


@pytest.mark.parametrize(("said", "taken"), [({}, 1), ({"train_micro_batch_size_per_gpu": 4}, 4)])
def test_a_loader_that_does_not_say_its_batch_size(said: dict[str, int], taken: int) -> None:
    agreed = agree({**said, "train_batch_size": 99}, replace(TRAINER, batch_size=None))
    assert agreed == {"train_micro_batch_size_per_gpu": taken, "zero_allow_untested_optimizer": True}


def test_what_deepspeed_refuses_itself_is_left_to_it() -> None:
    config = {
        "zero_allow_untested_optimizer": False,
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
    }
    assert agree(config, TRAINER) == config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"gradient_cliping": 1.0, "zero_optimisation": {"stage": 3}},
            "2 key(s) of its configuration: 'gradient_cliping'",
        ),
        (
            {"zero_optimisation": {"stage": 3}},
            "1 key(s) of its configuration: 'zero_optimisation' (did you mean 'zero_opt",
        ),
        (
            {"note": "of ours", "zero_optimization": {"stage": 2}, "steps_per_print": 9, "communication_data_type": 1},
            "",
        ),
    ],
)
def test_misspelt_keys_are_named(config: dict[str, Any], words: str, recwarn: pytest.WarningsRecorder) -> None:
    """DeepSpeed ignores keys that it does not know."""
    agree(config, TRAINER)
    told = [str(each.message) for each in recwarn if "DeepSpeed does not know" in str(each.message)]
    assert len(told) == bool(words)
    assert all(words in text for text in told)
