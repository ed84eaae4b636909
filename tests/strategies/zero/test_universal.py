"""What is refused; tests/multiprocess/test_zero.py converts real checkpoints and resumes from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from azureml_strategy.strategies.zero.universal import (
    convert,
    forget,
    require_convertible,
    saved_processes,
    saved_slices,
)


@pytest.mark.parametrize("key", ["base_optimizer_state", "optimizer_state_dict"])
def test_only_adams_states_are_converted(tmp_path: Path, key: str) -> None:
    """Stages 1 and 2 keep the states of the optimizer under one name, stage 3 under the other."""
    (tmp_path / "checkpoint").mkdir()
    for rank in (0, 1):
        state = {key: {"state": {0: {"momentum_buffer": torch.zeros(2)}}}}
        file = tmp_path / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, file)
    assert saved_processes(tmp_path) == 2
    with pytest.raises(ValueError, match=r"saved by 2 process.*keeps \['momentum_buffer'\].*azureml-strategy consol"):
        require_convertible(tmp_path)


def test_slices_of_matrices_are_not_converted(tmp_path: Path) -> None:
    """DeepSpeed would join slices of columns as if they were slices of rows."""
    (tmp_path / "checkpoint").mkdir()
    for slice_, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (tmp_path / "checkpoint" / f"bf16_zero_pp_rank_{rank}_mp_rank_{slice_:02d}_optim_states.pt").touch()
    assert (saved_processes(tmp_path), saved_slices(tmp_path)) == (4, 2)
    with pytest.raises(ValueError, match=r"saved by 4 processes with tensor_parallel_size=2.* and 4 processes"):
        require_convertible(tmp_path)


def test_nothing_but_an_earlier_save_is_forgotten(tmp_path: Path) -> None:
    shards, universal = tmp_path / "checkpoint", tmp_path / "checkpoint_universal"
    shards.mkdir()
    universal.mkdir()
    for file in (
        tmp_path / "latest_universal",
        tmp_path / "notes.txt",
        shards / "zero_pp_rank_3_mp_rank_00_optim_states.pt",
        shards / "zero_pp_rank_3_mp_rank_00_model_states.pt",
        shards / "mine.pt",
        universal / "weight.pt",
    ):
        file.touch()
    forget(tmp_path)
    forget(tmp_path / "absent")
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["checkpoint", "mine.pt", "notes.txt"]


def test_what_is_converted_is_not_converted_again(tmp_path: Path) -> None:
    (tmp_path / "latest_universal").write_text("checkpoint_universal")
    convert(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["latest_universal"]
