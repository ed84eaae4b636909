"""A LightningModule that trains a GPT on sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW
from typing_extensions import override

from azureml_strategy.interfaces import IGNORED_LABEL, ChainLayer
from azureml_strategy.models import optimizer as recipe
from azureml_strategy.models.chain import build_chain
from azureml_strategy.models.evaluation import mean_cross_entropy
from azureml_strategy.models.gpt import (
    Block,
    CausalSelfAttention,
    Embedding,
    OutputLayer,
    gpt_layers,
    users_hooks,
)
from azureml_strategy.models.gpt_config import GPTConfig
from azureml_strategy.models.label_means import MeanOverLabels
from azureml_strategy.sequence_parallel import SequenceGroup

Batch = tuple[Tensor, Tensor]


class NextTokenModule(MeanOverLabels):
    """The evaluation and the optimizer of modules that learn to predict each next token."""

    def evaluation_loss(self, batch: Any) -> Tensor:
        """Return the mean cross-entropy over the tokens of a batch."""
        raise NotImplementedError

    def evaluation_labels(self, batch: Any) -> Tensor:
        """Return the labels of a batch, by whose number `evaluation_loss` is weighed."""
        raise NotImplementedError

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Average over batches and ranks, weighted by their tokens: exact, whatever their sizes.
        tokens = (self.evaluation_labels(batch) != IGNORED_LABEL).sum()  # a tensor, as nothing is to wait for the GPU
        # Lightning's own strategies average these weights over the ranks in whole numbers, so they must divide.
        weight = tokens * self.trainer.world_size
        self.log_evaluation("loss", self.evaluation_loss(batch), batch_size=weight)

    @override
    def on_validation_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["test/loss" if self.trainer.testing else "val/loss"]
        # The same on every rank already. The maximum of equal numbers is exact; their mean may be rounded.
        self.log_evaluation("perplexity", loss.exp(), reduce_fx="max")

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def adamw(self, learning_rate: float, eps: float = 1e-8) -> OptimizerLRSchedulerConfig:
        """Return AdamW, with a learning rate that changes at every step."""
        settings = self.hparams
        groups = recipe.decay_groups(self, settings["weight_decay"])
        fused = recipe.fused(AdamW, groups, settings.get("fused"), self.trainer.precision)
        adamw = AdamW(groups, lr=learning_rate, betas=(settings["beta1"], settings["beta2"]), eps=eps, fused=fused)
        recipe.keep_fused(adamw, self.trainer.precision)
        total = recipe.total_steps(self.trainer)
        return {
            "optimizer": adamw,
            "lr_scheduler": recipe.warmup_cosine_schedule(adamw, settings["warmup_steps"], total),
        }


class LanguageModel(NextTokenModule):
    """A GPT that learns to predict each next token.

    Batches are `(inputs, targets)`, both int64 `(N, T)`: the target of a token is the next token, and a target of -100
    is ignored. `configure_model` builds the layers, or a pipeline builds each stage's own. Outside a Trainer, call
    `configure_model` first. The parameters are named `layers.<place>.<name in the layer>`.

    The gradients are those of the mean over the tokens of all ranks and accumulated batches, however many each has. It
    logs `train/loss` at every step, the mean over this rank's tokens. After an evaluation it logs `val/loss` and
    `val/perplexity` (`test/...`), its exponential, over all tokens of all ranks.

    Args:
        network: the shape of the network.
        learning_rate: peak, whatever the batch size.
        beta1: decay of AdamW's mean of gradients; both defaults are those of Brown et al. 2020, appendix B
            (https://arxiv.org/abs/2005.14165).
        beta2: decay of AdamW's mean of squared gradients.
        eps: of AdamW.
        weight_decay: of matrices and embeddings; normalisations and biases do not decay.
        warmup_steps: optimizer steps of the linear warm-up; after it the rate falls along a cosine.
        seed: of the initial parameters.
        fused: AdamW takes a step in one kernel; None on GPUs where it can, see `models.optimizer.fused`.
    """

    def __init__(
        self,
        network: GPTConfig,
        learning_rate: float = 6e-4,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        seed: int = 0,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["network"], logger=False)
        self.network = network
        self.layers = nn.ModuleList()
        self.sequence: SequenceGroup | None = None

    def pipeline_layers(self) -> list[ChainLayer]:
        """Return the network as a chain, for a strategy that gives each rank a part of it."""
        return gpt_layers(self.network, self.hparams["seed"])

    def pipeline_batch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer, and the targets for the loss."""
        inputs, targets = batch
        return inputs, targets

    def training_flops(self, batch: Batch) -> float:
        """Floating-point operations of a forward and backward pass on a batch, see `GPTConfig.flops_per_token`."""
        inputs = batch[0]
        return float(inputs.numel() * self.network.flops_per_token(inputs.shape[1]))

    def pipeline_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the tokens of a batch, in float32, in nats."""
        return mean_cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def sharded_blocks(self) -> Iterable[nn.Module]:
        """Return the parts of the network whose parameters are gathered one after the other."""
        return (layer for layer in self.layers if isinstance(layer, Block))

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return how the matrices of the blocks are cut: by output, `colwise`, or by input, `rowwise`.

        The plan is that of Shoeybi et al. 2019, section 3 (https://arxiv.org/abs/1909.08053). Embedding and output
        matrix stay whole, because few vocabulary sizes are divisible by the number of ranks.
        """
        by_output = ["attention.query", "attention.key", "attention.value", "mlp.up"]
        by_output += ["mlp.gate"] if self.network.mlp == "swiglu" else []
        styles = {**dict.fromkeys(by_output, "colwise"), "attention.output": "rowwise", "mlp.down": "rowwise"}
        return {f"layers.*.{name}": style for name, style in styles.items()}

    def tensor_parallel_counts(self) -> dict[str, int]:
        """Return what each rank of a tensor-parallel group gets an equal share of."""
        return {"heads": self.network.heads, "heads of keys and values": self.network.key_value_heads}

    def cut_sequences(self, group: SequenceGroup | None) -> None:
        """Compute this rank's part of each sequence from now on; with None, all of it again."""
        self.sequence = group
        for layer in self.layers.modules():
            if isinstance(layer, (Embedding, CausalSelfAttention)):
                layer.sequence = group

    @override
    def configure_model(self) -> None:
        if not self.layers:  # Lightning calls this again for each fit, validate and test
            self.layers.extend(build_chain(self.pipeline_layers()))

    @override
    def setup(self, stage: str) -> None:
        """Check that the network fits the vocabulary and the sequence length of the data module, where it has them.

        Raises:
            ValueError: the data has more tokens than the network, or longer sequences.
        """
        data = getattr(self.trainer, "datamodule", None)
        tokens = getattr(data, "vocab_size", None)
        if tokens is not None and tokens > self.network.vocab_size:
            raise ValueError(
                f"The network has {self.network.vocab_size} tokens, but the tokenizer has {tokens}, and those beyond "
                f"would have no embedding. Set model.network.vocab_size={tokens} or more."
            )
        self._check_length(getattr(data, "sequence_length", None))

    @override
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map int64 `(N, T)` to logits `(N, T, vocab_size)`, or with targets `(N, T)` to their mean cross-entropy.

        The loss takes less memory than the logits would, see `OutputLayer`.
        """
        if targets is not None:
            return self._loss_in_layers(tokens, targets)
        part = self._logits(tokens)
        return part if self.sequence is None else self.sequence.whole(part, tokens.shape[1])

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, targets = self._loss(batch), self.pipeline_batch(batch)[1]
        # A pipeline averages over micro-batches by this number. A tensor, as nothing is to wait for the GPU.
        self.log("train/loss", loss, batch_size=cast(int, (targets != IGNORED_LABEL).sum()))
        if type(self).pipeline_loss is not LanguageModel.pipeline_loss:
            return loss  # it need not be a mean over tokens
        return self.weighed(loss, targets)

    @override
    def evaluation_labels(self, batch: Batch) -> Tensor:
        return batch[1]

    @override
    def evaluation_loss(self, batch: Batch) -> Tensor:
        return self._loss(batch)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW, with a learning rate that changes at every step."""
        return self.adamw(self.hparams["learning_rate"], self.hparams["eps"])

    def _loss(self, batch: Batch) -> Tensor:
        inputs, targets = self.pipeline_batch(batch)
        if self._output_gives_loss():
            return cast(Tensor, self(inputs, targets))
        # A subclass's loss of all tokens need not be the mean of those of the parts.
        if self.sequence is None or type(self).pipeline_loss is not LanguageModel.pipeline_loss:
            return self.pipeline_loss(self(inputs), targets)
        part, share = self._part_of(targets, self.sequence)
        return self.sequence.mean(self.pipeline_loss(self._logits(inputs), part) * share)

    def _output_gives_loss(self) -> bool:
        """Whether nobody else needs the logits: a subclass's loss or forward, a pipeline, or a user's hooks."""
        own = _functions(self.pipeline_loss, self.forward) == _OWN
        output = self.layers[-1] if own and self.layers else None
        return isinstance(output, OutputLayer) and output.may_give_loss() and not users_hooks(self)

    def _loss_in_layers(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.sequence is None:
            return cast(Tensor, self.layers[-1](self._states(tokens), targets))
        part, share = self._part_of(targets, self.sequence)
        return self.sequence.mean(self.layers[-1](self._states(tokens), part) * share)

    @staticmethod
    def _part_of(targets: Tensor, sequence: SequenceGroup) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the targets, and the weight of its mean in that of the whole batch."""
        part = sequence.part(targets, IGNORED_LABEL)
        # The parts have unequal numbers of targets. Their mean is to be that of the whole batch.
        share = (part != IGNORED_LABEL).sum() * sequence.size / (targets != IGNORED_LABEL).sum().clamp(min=1)
        return part, share

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of this rank's part of the tokens."""
        return cast(Tensor, self.layers[-1](self._states(tokens)))

    def _states(self, tokens: Tensor) -> Tensor:
        """Return what the last layer gets of this rank's part of the tokens."""
        states = tokens
        if self.sequence is not None:
            if self.network.positions == "learned":
                self._check_length(tokens.shape[1])
            states = self.sequence.part(tokens)
        for layer in list(self.layers)[:-1]:
            states = layer(states)
        return states

    def _check_length(self, length: int | None) -> None:
        if length is not None and length > self.network.context:
            raise ValueError(
                f"The data has sequences of {length} tokens, but the network is for {self.network.context}. Set "
                f"data.sequence_length={self.network.context} or less, or model.network.context={length}."
            )


def _functions(*methods: Any) -> list[Any]:
    return [getattr(each, "__func__", each) for each in methods]


# What a subclass, an object or a patch may have replaced.
_OWN = _functions(LanguageModel.pipeline_loss, LanguageModel.forward)
