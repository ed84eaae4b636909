"""What our strategies add to checkpoints of transformers models: their record, and no copy of a frozen base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Trainer
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from azureml_strategy.checkpoint.serialization import PlainDataStrategy
from azureml_strategy.huggingface.adapters import base_parameters, checksums, digest, is_original
from azureml_strategy.huggingface.record import (
    BaseRecord,
    CheckpointRecord,
    ModelRecord,
    places_of_files,
    record_models,
    tokenizer_files,
)


class BaseModelError(ValueError):
    """A checkpoint of adapters, and a base that they were not trained on."""


class RecordsModels(PlainDataStrategy):
    """Mix-in for strategies whose checkpoints describe the transformers models in them.

    `azureml-strategy consolidate --format hf` makes a folder for `from_pretrained` of such a checkpoint. While the
    strategy runs, the frozen parameters of a base that peft has wrapped are left out of the module's state dict, if
    they come from files. A checkpoint has their checksums instead, and one that was written on another base is refused.
    """

    leaves_base_out: ClassVar[bool] = True
    """Whether checkpoints are written from the module's state dict, from which the base is left out."""
    _models: tuple[ModelRecord, ...] = ()
    _base: BaseRecord | None = None
    _without_base: _WithoutBase | None = None
    _places: Sequence[tuple[str, str | None]] = ()
    _tokenizer: Mapping[str, Any] | None = None
    _loaded: tuple[str, CheckpointRecord | None] | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        with self.recording_models():
            super().setup(trainer)

    @contextmanager
    def recording_models(self) -> Iterator[None]:
        """Read what is to be recorded before the strategy cuts the module, and checksums once its weights are final.

        Checksums are computed by a collective, if a base is left out.
        """
        module = self._leave_base_out()
        self._models, self._places = record_models(module), places_of_files(module)
        yield
        parameters = base_parameters(module) if self._without_base is not None else {}
        if parameters:
            dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
            compared = {name: each for name, each in parameters.items() if not is_original(name)}
            self._base = BaseRecord(checksums(compared), dtype)
        self._check_base()

    @override
    def own_entries(self) -> dict[str, Any]:
        if not self._models:
            return super().own_entries()
        if self._tokenizer is None:
            assert self.lightning_module is not None
            datamodule = getattr(self.lightning_module.trainer, "datamodule", None)
            holders = [self.lightning_module, *([] if datamodule is None else [datamodule])]
            # Sharded strategies write these entries once for each rank. Readers take rank 0's.
            self._tokenizer = tokenizer_files(holders, self._places) if self.is_global_zero else {}
        return {**super().own_entries(), **CheckpointRecord(self._models, self._base, self._tokenizer).entry()}

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._leave_base_out()
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._loaded = str(checkpoint_path), CheckpointRecord.of(checkpoint)
        if self._models:
            self._check_base()
        return checkpoint

    @override
    def teardown(self) -> None:
        if self._without_base is not None:
            self._without_base.remove()
        self._models, self._base, self._without_base, self._tokenizer, self._loaded = (), None, None, None, None
        super().teardown()

    def only_base_is_frozen(self) -> bool:
        """Whether checkpoints leave a base out, and no other parameter is frozen."""
        if self._without_base is None or self.lightning_module is None:
            return False
        base = {id(each) for each in base_parameters(self.lightning_module).values()}
        return all(each.requires_grad or id(each) in base for each in self.lightning_module.parameters())

    def has_models(self) -> bool:
        """Whether the module holds a transformers model, once the strategy is set up."""
        return bool(self._models)

    def export_hugging_face(self, checkpoint: Path, output: Path) -> None:
        """See `ExportsModels`."""
        from azureml_strategy.huggingface.export import ExportOptions, write_hugging_face

        several = len(self._models) > 1
        for each in self._models:
            to = output / each.name if several else output
            merge = each.adapters is not None and self._base is None  # no file has the base that the adapters fit
            write_hugging_face(checkpoint, to, ExportOptions(module=each.name, merge=merge))

    def _leave_base_out(self) -> nn.Module:
        """Leave the base out of the state dict from now on. Strategies load a checkpoint before or after `setup`."""
        module = self.lightning_module
        assert module is not None
        if self.leaves_base_out and self._without_base is None:
            names = base_parameters(module).keys()
            self._without_base = _WithoutBase(module, names) if names else None
        return module

    def _check_base(self) -> None:
        """Refuse a loaded checkpoint whose adapters were trained on another base."""
        if self._loaded is None:
            return
        path, record = self._loaded
        if record is None or record.base is None:
            self._keep_base(path)
            return
        theirs, own = record.base.checksums, {} if self._base is None else self._base.checksums
        different = [name for name, value in theirs.items() if own.get(name) != value]
        if different:
            raise BaseModelError(
                f"{path} has adapters of the base {_name(record.models)} (checksum {digest(theirs)}), but this run has "
                f"{_name(self._models)} (checksum {digest(own)}): {len(different)} of {len(theirs)} parameters differ, "
                f"such as {different[0]}. Load the base that the checkpoint names, in the same dtype."
            )

    def _keep_base(self, path: str) -> None:
        """Write the base too from now on: a checkpoint with a base in it has replaced the values from the files."""
        if self._without_base is None:
            return
        if not self._without_base.overwritten:
            raise BaseModelError(
                f"{path} was written with its base in it, and this strategy has read the adapters only. Resume with "
                "the strategy that wrote it, or without a checkpoint from a folder that `azureml-strategy consolidate "
                f"{path} FOLDER --format hf --merge` makes."
            )
        self._without_base.remove()
        self._without_base = self._base = None


class _WithoutBase:
    """Leaves parameters out of a module's state dict, and allows them to be missing when one is loaded.

    `overwritten` says whether the last state dict that was loaded held all of them nevertheless.
    """

    def __init__(self, module: nn.Module, names: Any) -> None:
        self._names = frozenset(names)
        self.overwritten = False
        self._handles: list[RemovableHandle] = [
            # torch sets an attribute on this hook, and a method takes none.
            module.register_state_dict_post_hook(partial(self._leave_out)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(self._allow_missing),  # type: ignore[no-untyped-call]
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _leave_out(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in self._names:
            state.pop(prefix + name, None)

    def _allow_missing(self, module: nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        self.overwritten = not self._names & set(missing)
        missing[:] = [name for name in missing if name not in self._names]


def _name(models: tuple[ModelRecord, ...]) -> str:
    names = [f"{each.source} at {each.revision}" if each.revision else each.source for each in models if each.adapters]
    return ", ".join(name or "(no file)" for name in names) or "(none)"
