from __future__ import annotations

from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from azureml_strategy.strategies.zero.layout import require_same_slices, require_zero_checkpoint


def write(folder: Path, *names: str) -> Path:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("checkpoint")
    return folder


def test_what_lightning_wrote_under_zero(tmp_path: Path) -> None:
    folder = write(tmp_path / "a.ckpt", "latest", "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    require_zero_checkpoint(folder)
    with pytest.raises(FileNotFoundError, match=r"is a part of a DeepSpeed checkpoint. Give the whole: .*/a.ckpt$"):
        require_zero_checkpoint(folder / "checkpoint")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["checkpoint/layer_00-model_states.pt", "checkpoint/x_optim_states.pt"], "azureml_deepspeed_pipeline"),
        ([".metadata"], "strategy='azureml_model_parallel'"),
        (["other"], "is no DeepSpeed checkpoint"),
    ],
)
def test_other_folders(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(MisconfigurationException, match=words):
        require_zero_checkpoint(write(tmp_path / "a.ckpt", *names))


def test_a_file(tmp_path: Path) -> None:
    write(tmp_path, "last.ckpt")
    with pytest.raises(FileNotFoundError, match=r"is a single file.*'azureml_ddp'.*load_full_weights=True"):
        require_zero_checkpoint(tmp_path / "last.ckpt")


def test_matrices_cut_over_another_number(tmp_path: Path) -> None:
    require_same_slices(tmp_path, saved=2, size=2)
    with pytest.raises(
        MisconfigurationException, match=r"saved with tensor_parallel_size=2, but this run has 1.*Write tensor_par"
    ):
        require_same_slices(tmp_path, saved=2, size=1)
