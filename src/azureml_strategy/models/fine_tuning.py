"""A LightningModule that fine-tunes a causal language model of transformers, whole or by adapters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from typing_extensions import override

from azureml_strategy.huggingface.loading import load_pretrained
from azureml_strategy.huggingface.sources import PretrainedModelError
from azureml_strategy.huggingface.token_loss import adds_to_loss, token_losses
from azureml_strategy.interfaces import IGNORED_LABEL
from azureml_strategy.models.fine_tuning_loss import loss_in_chunks, only_the_loss_is_seen, passes_logits_on
from azureml_strategy.models.language_model import NextTokenModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Usual peaks of AdamW: for all weights, and for adapters, which start from zero.
_RATES = {False: 2e-5, True: 2e-4}
# Passes over each weight, in multiply-adds of 2 FLOPs: forward, gradient of the inputs, gradient of the weights. Frozen
# weights have no gradient of their own.
_FLOPS_PER_WEIGHT = {False: 6.0, True: 4.0}
# Arguments of the model's forward that this module sets, whatever a batch has under these names.
_SET_HERE = {"labels", "shift_labels", "num_items_in_batch", "use_cache"}


class FineTuner(NextTokenModule):
    """A pretrained language model that learns from `TextDataModule` or `ChatDataModule`.

    Batches are pairs `(inputs, targets)`, or dictionaries with `input_ids`, `shift_labels` and `attention_mask`, all
    int64 `(N, T)`: the label of a token is the next token, and -100 is ignored. The model gets whatever else of a
    dictionary its forward takes by name, such as `position_ids`; a warning names the other keys once. The loss is the
    mean over the tokens of all ranks and micro-batches, however many each has, and gradients are those of the mean over
    all tokens of an optimizer step, accumulated batches included.

    The logits of a large batch are computed in chunks where the model gives them to its loss as they are, see
    `fine_tuning_loss`.

    It logs `train/loss` at every step, and after an evaluation `val/loss` and its exponential, `val/perplexity`
    (`test/...`). These are cross-entropies. What a model adds to its loss, as a mixture of experts does with
    `output_router_logits=True` in its configuration, is trained as well, and logged as `train/auxiliary_loss`.

    Args:
        path: a folder that `save_pretrained` wrote, an id of the Hugging Face hub, or `azureml:NAME:VERSION`.
        revision: branch, tag or commit on the hub.
        lora_rank: rank of LoRA adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685); 0 trains all weights.
        lora_alpha: scale of the adapters; None is twice the rank.
        lora_dropout: of the adapters' inputs.
        lora_targets: names of the layers that get adapters, or `all-linear`.
        activation_checkpointing: keep only the inputs of each block, and recompute the rest in the backward pass, as
            transformers does it. The strategies' own argument of that name is for pipelines and sharded blocks.
        attention: transformers' implementation, such as `sdpa` or `flash_attention_2`; None lets it choose.
        learning_rate: peak; None is 2e-5, and 2e-4 with adapters.
        beta1: decay of AdamW's mean of gradients.
        beta2: decay of AdamW's mean of squared gradients.
        weight_decay: of matrices and embeddings; normalisations and biases do not decay.
        warmup_steps: optimizer steps of the linear warm-up; after it the rate falls along a cosine.
        fused: AdamW takes a step in one kernel; None on GPUs where it can, see `models.optimizer.fused`.

    Raises:
        PretrainedModelError: in `configure_model`, the model cannot be found or read, no layer has the name
            of a target, or the tokenizer has more tokens than the model.
    """

    def __init__(
        self,
        path: str,
        revision: str | None = None,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        lora_targets: str | list[str] = "all-linear",
        activation_checkpointing: bool = False,
        attention: str | None = None,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.95,
        weight_decay: float = 0.0,
        warmup_steps: int = 10,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.model: PreTrainedModel | Any = None
        self._weights = 0
        self._passes_logits_on = False
        self._warned_of: set[str] = set()  # keys of batches
        self._accepted: set[str] | None = None  # by the model's forward; looked up once, as it takes some time

    @override
    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this again for each fit, validate and test
            return
        settings = self.hparams
        changes = {"attn_implementation": settings["attention"]} if settings["attention"] else {}
        model = load_pretrained(settings["path"], revision=settings["revision"], **changes)
        if settings["activation_checkpointing"]:
            recompute: Any = model.gradient_checkpointing_enable
            recompute({"use_reentrant": False})
        # A plan of memory and speed builds it without a Trainer.
        tokens = getattr(getattr(self._trainer, "datamodule", None), "vocab_size", None)
        rows = model.config.get_text_config().vocab_size
        if tokens is not None and tokens > rows:
            raise PretrainedModelError(
                f"The tokenizer of the data has {tokens} tokens, but {settings['path']} has embeddings for {rows}: "
                f"it is another model's. Write data.tokenizer={settings['path']}."
            )
        self._weights = sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters())
        self._passes_logits_on = passes_logits_on(model)
        self.model = self._with_adapters(model) if settings["lora_rank"] else model

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Mapping[str, Tensor]:
        """Bring a batch into the form of transformers, and warn of what the model does not get of it."""
        if isinstance(batch, Mapping):
            self._warn_of_unread([name for name in batch if name not in {*self._inputs(batch), "shift_labels"}])
            return batch
        self._warn_of_unread([f"entry {place}" for place in range(2, len(batch))])
        return {"input_ids": batch[0], "shift_labels": batch[1]}

    @override
    def labels_of(self, batch: Any) -> Any:
        return batch.get("shift_labels") if isinstance(batch, Mapping) else None

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.require_count()
        tokens = _tokens(batch) if self._mean_labels is None else self._mean_labels
        loss, entropy = self._losses(batch, tokens)
        self.log("train/loss", entropy, sync_dist=True)
        if entropy is not loss:
            self.log("train/auxiliary_loss", loss.detach() - entropy, sync_dist=True)
        return self.for_step(loss)

    @override
    def evaluation_labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["shift_labels"]

    @override
    def evaluation_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._losses(batch, _tokens(batch))[1]

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW, with a learning rate that changes at every step."""
        return self.adamw(self.hparams["learning_rate"] or _RATES[bool(self.hparams["lora_rank"])])

    def training_flops(self, batch: Mapping[str, Tensor]) -> float:
        """Floating-point operations of a forward and backward pass on a batch, without attention's own.

        6 for each weight and token, 4 with adapters (Kaplan et al. 2020, section 2.1,
        https://arxiv.org/abs/2001.08361).
        """
        return _FLOPS_PER_WEIGHT[bool(self.hparams["lora_rank"])] * self._weights * batch["input_ids"].numel()

    @property
    def _pretrained(self) -> Any:
        """The model of transformers, without adapters around it."""
        model: Any = self.model
        return model.get_base_model() if self.hparams["lora_rank"] else model

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a model gets of a batch beside the labels."""
        if self._accepted is None:
            self._accepted = forward_arguments(self._pretrained) - _SET_HERE
        return {name: value for name, value in batch.items() if name in self._accepted}

    def _warn_of_unread(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._warned_of]
        self._warned_of.update(new)
        if new:
            rank_zero_warn(
                f"FineTuner does not read {', '.join(new)} of its batches: it reads shift_labels, and what the forward "
                f"of {type(self._pretrained).__name__} takes by name. Rename what is to be read, or leave it out of "
                "the batches."
            )

    def _losses(self, batch: Mapping[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's loss, and the cross-entropy in it: the sum over a batch's tokens, divided by `tokens`.

        They are one tensor if the model adds nothing to the cross-entropy.
        """
        labels = batch["shift_labels"]
        with self._loss_function(labels, tokens) as entropies:
            outputs = self.model(
                **self._inputs(batch), labels=labels, shift_labels=labels, num_items_in_batch=tokens, use_cache=False
            )
        loss: Tensor = outputs.loss
        return loss, loss if entropies is None else entropies[-1]

    def _loss_function(self, labels: Tensor, tokens: Tensor) -> AbstractContextManager[list[Tensor] | None]:
        """Return what collects the cross-entropies of a model that adds to them, or computes those of others."""
        model = self._pretrained
        if adds_to_loss(model):
            return token_losses(model)
        if self._passes_logits_on and only_the_loss_is_seen(model, self.model):
            return loss_in_chunks(model, labels, tokens)
        return nullcontext()

    def _with_adapters(self, model: PreTrainedModel) -> Any:
        import peft

        settings = self.hparams
        rank = settings["lora_rank"]
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=settings["lora_alpha"] or 2 * rank,
            lora_dropout=settings["lora_dropout"],
            target_modules=settings["lora_targets"],
            task_type="CAUSAL_LM",
        )
        targets = settings["lora_targets"]
        names = [] if isinstance(targets, str) else list(targets)
        layers = [f".{name}" for name, _ in model.named_modules()]
        unused = [name for name in names if not any(layer.endswith(f".{name}") for layer in layers)]
        if 0 < len(unused) < len(names):  # peft refuses targets only if none of them names a layer
            rank_zero_warn(
                f"{len(unused)} of {len(names)} names in model.lora_targets are of no layer of {settings['path']}, "
                f"and no adapters are added for them: {', '.join(unused)}."
            )
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            linear = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if _has_matrix(each)})
            raise PretrainedModelError(
                f"model.lora_targets={settings['lora_targets']} names no layer of {settings['path']}: {error} Its "
                f"linear layers are {', '.join(linear)}; all-linear takes all but the last."
            ) from error


def forward_arguments(model: PreTrainedModel) -> set[str]:
    """Return the names of what a model's forward takes, with those that it lists as its further keywords."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    # `**kwargs: Unpack[TransformersKwargs]`, a TypedDict, lists what flash attention needs of packed samples, and more.
    listed = [kind for each in parameters if each.kind is each.VAR_KEYWORD for kind in get_args(each.annotation)]
    return named.union(*(kind.__annotations__ for kind in listed))


def _tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """The number of a batch's tokens with a label, at least 1, as the sum of losses is divided by it."""
    return (batch["shift_labels"] != IGNORED_LABEL).sum().clamp(min=1).float()


def _has_matrix(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, torch.nn.Embedding)
