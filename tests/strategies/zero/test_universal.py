from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from azureml_strategy.strategies.zero import checkpoint as universal
from azureml_strategy.strategies.zero.checkpoint import (
    convert,
    correct_stage_3,
    keep_kernels,
    remove_previous_files,
    require_convertible,
    require_same_slices,
    require_zero_checkpoint,
    saved_processes,
    saved_slices,
)


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
    remove_previous_files(tmp_path)
    remove_previous_files(tmp_path / "absent")
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["checkpoint", "mine.pt", "notes.txt"]


def test_what_is_converted_is_not_converted_again(tmp_path: Path) -> None:
    (tmp_path / "latest_universal").write_text("checkpoint_universal")
    convert(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["latest_universal"]


def test_another_deepspeed_is_not_corrected_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(universal, "version", lambda name: "0.20.1")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(MisconfigurationException, match=r"0\.20\.1 is installed.*deepspeed==0\.19\.\*"):
        correct_stage_3(optimizer, tmp_path)


@pytest.mark.parametrize("fused", [True, None])
def test_an_optimizer_keeps_its_own_kernels_and_goes_on(fused: bool | None) -> None:
    """DeepSpeed sets the groups and the state of the process that saved, which may have had others."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([weight], fused=fused)
    optimizer.step()
    before = [group["fused"] for group in optimizer.param_groups]
    optimizer.param_groups[0]["fused"] = None if fused else True
    keep_kernels(optimizer, before)
    assert [group["fused"] for group in optimizer.param_groups] == [fused]
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2


def test_a_fused_kernel_reads_its_step_where_the_weights_are() -> None:
    weight, plain, new = (torch.nn.Parameter(torch.empty(4, device="meta")) for _ in range(3))
    optimizer = torch.optim.AdamW([{"params": [weight, new]}, {"params": [plain]}])
    for each in (weight, plain):
        optimizer.state[each]["step"] = torch.tensor(2.0)
    keep_kernels(optimizer, [True, False])
    assert optimizer.state[weight]["step"].device.type == "meta"
    assert optimizer.state[plain]["step"].device.type == "cpu"
    assert new not in optimizer.state
