"""The layers of a GPT and their initial values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from azureml_strategy.interfaces import ChainLayer
from azureml_strategy.models.chain import seeded
from azureml_strategy.models.evaluation import at_least_float32, mean_cross_entropy
from azureml_strategy.models.gpt_config import GPTConfig
from azureml_strategy.models.linear_loss import (
    autocasts,
    computing_type,
    linear_cross_entropy,
    takes_chunks,
    whole_tiles,
)
from azureml_strategy.sequence_parallel import SequenceGroup

# Standard deviation of GPT-2's initial matrices and embeddings (Radford et al. 2019, `initializer_range` of
# https://huggingface.co/openai-community/gpt2/blob/main/config.json).
INITIAL_STD = 0.02
# Where the hooks of strategies are defined.
_STRATEGIES = ("azureml_strategy.", "deepspeed.", "lightning.", "torch.distributed.")


def rotate(states: Tensor, base: float) -> Tensor:
    """Turn the numbers i and i + D/2 of each state by `place * base**(-2i/D)`.

    This is Su et al. 2021, section 3.2 (https://arxiv.org/abs/2104.09864), with the pairs laid out as in Llama's
    published weights for transformers. It computes in float32 at least: in bfloat16 an angle of 1,000 may be off by 2.

    Args:
        states: queries or keys, `(..., T, D)`, D even.
        base: longest wavelength over 2 pi, in tokens.
    """
    precise = at_least_float32(states)
    # A compiler would not see the cache; it computes the table in the kernel that uses it. And what a trace on fake
    # tensors leaves there, a later step could not read.
    table = _table if type(precise) is Tensor and not torch.compiler.is_compiling() else _angles
    cosine, sine = table(states.shape[-2], states.shape[-1], base, states.device, precise.dtype)
    first, second = precise.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.type_as(states)


def _angles(length: int, width: int, base: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles, `(length, width / 2)` each."""
    exponents = torch.arange(0, width, 2, dtype=dtype, device=device) / width
    places = torch.arange(length, dtype=dtype, device=device)
    angles = torch.outer(places, base**-exponents)
    return angles.cos(), angles.sin()


# Not a buffer: a precision plugin would convert it, and each block of a pipeline needs it.
@functools.lru_cache(maxsize=8)
def _table(length: int, width: int, base: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # The first use may be a validation under inference_mode. A later backward pass cannot use tensors made there.
    with torch.inference_mode(False):
        return _angles(length, width, base, device, dtype)


def residual_std(config: GPTConfig) -> float:
    """Standard deviation of the matrices that write to the residual stream.

    Each block adds to the stream twice, so without this it would grow with the root of `2 * layers` (Radford et al.
    2019, section 2.3).
    """
    return INITIAL_STD / math.sqrt(2 * config.layers)


class CausalSelfAttention(nn.Module):
    """Lets every token attend to itself and the tokens before it, by torch's `scaled_dot_product_attention`.

    Queries, keys and values have separate matrices, so that tensor parallelism can give each rank some of the heads.
    The number of heads is read from the states. One product computes all three where that takes no more memory.
    """

    sequence: SequenceGroup | None = None  # ranks that have a part of each sequence; None if this one has all of it

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.grouped = config.key_value_heads != config.heads
        self.rotary_base = config.rotary_base if config.positions == "rotary" else None
        self.dropout = config.dropout
        self.query = NormalLinear(config.width, config.width, config.bias)
        self.key = NormalLinear(config.width, config.key_value_heads * config.head_width, config.bias)
        self.value = NormalLinear(config.width, config.key_value_heads * config.head_width, config.bias)
        self.output = NormalLinear(config.width, config.width, config.bias, residual_std(config))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(N, T, width)` to `(N, T, width)`."""
        matrices = (self.query, self.key, self.value)
        alike = len({matrix.bias is None for matrix in matrices}) == 1  # a user may have taken a bias away
        together = autocasts(hidden) and alike and all(map(called_plainly, matrices))
        states = joined(hidden, matrices) if together else [matrix(hidden) for matrix in matrices]
        query, key, value = map(self._heads, states)
        if self.sequence is not None:  # all tokens, so that `rotate` counts from the first
            query, key, value = (self.sequence.heads(states) for states in (query, key, value))
        if self.rotary_base is not None:
            query, key = rotate(query, self.rotary_base), rotate(key, self.rotary_base)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=self.grouped
        )
        if self.sequence is not None:
            attended = self.sequence.tokens(attended)
        return cast(Tensor, self.output(attended.transpose(1, 2).flatten(2)))

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """Two matrices with a GELU between them, in GPT-2's tanh approximation; or SwiGLU (Shazeer 2020).

    SwiGLU (https://arxiv.org/abs/2002.05202) multiplies two projections, one of them after a SiLU, and projects back.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        gated = config.mlp == "swiglu"
        self.gate = NormalLinear(config.width, config.mlp_width, config.bias) if gated else None
        self.up = NormalLinear(config.width, config.mlp_width, config.bias)
        self.down = NormalLinear(config.mlp_width, config.width, config.bias, residual_std(config))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(N, T, width)` to `(N, T, width)`."""
        if self.gate is None:
            return cast(Tensor, self.down(functional.gelu(self.up(hidden), approximate="tanh")))
        return cast(Tensor, self.down(functional.silu(self.gate(hidden)) * self.up(hidden)))


class NormalLinear(nn.Linear):
    """A linear layer whose matrix starts from a normal distribution and whose bias starts at zero."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float = INITIAL_STD) -> None:
        self.std = std  # set first, as torch's constructor draws the values
        super().__init__(in_features, out_features, bias=bias)

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def joined(hidden: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Return what each layer returns for the same input, by one product with their matrices below one another.

    They are copied for it. Autocast copies matrices anyway, to cast them. Otherwise the copy would be kept for the
    backward pass, beside shards of FSDP2, which gives a block's whole matrices back after its forward pass.
    """
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    states = functional.linear(hidden, torch.cat(weights), torch.cat(biases) if biases else None)
    return torch.split(states, [layer.out_features for layer in layers], dim=-1)


def called_plainly(layer: nn.Linear) -> bool:
    """Whether a layer's call is the product with its own matrix: nobody has replaced it, wrapped it or watches it.

    Hooks gather the matrix (ZeRO-3) or share the product (tensor parallelism), adapters and parametrizations replace
    the class, and users watch activations.
    """
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    replaced = "forward" in vars(layer) or layer._compiled_call_impl is not None
    return (
        type(layer) is NormalLinear
        and type(layer.weight) is nn.Parameter
        and not replaced
        and not any(hooks)
        and not hooks_everywhere()
    )


def hooks_everywhere() -> bool:
    """Whether somebody hooks all modules of the process."""
    names = ("forward_pre", "forward", "backward_pre", "backward")
    return any(getattr(nn.modules.module, f"_global_{name}_hooks") for name in names)


def users_hooks(module: nn.Module) -> bool:
    """Whether a module's forward pass has hooks that are not of strategies, which gather parameters."""
    if module._backward_pre_hooks or module._backward_hooks or hooks_everywhere():
        return True
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of a functools.partial
    return not all(str(getattr(each, "__module__", None)).startswith(_STRATEGIES) for each in functions)


class OutputLayer(NormalLinear):
    """The output matrix: maps hidden states to logits, or to their mean cross-entropy with targets.

    The loss is computed inside of this layer, as strategies that shard parameters gather its matrix for its forward
    pass. On a GPU the loss multiplies the matrix with rows of zeros below it, up to a multiple of 64, as tensor cores
    take whole tiles. Their columns are cut off. Logits that are returned never had them.
    """

    @override
    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map `(N, T, width)` to logits `(N, T, classes)`, or with int64 targets `(N, T)` to a number.

        The number is what `mean_cross_entropy` gives for the logits. Many logits are computed in chunks, see
        `takes_chunks`.
        """
        # A matrix that is cut over ranks, quantized, or computed of other parameters is left to torch, and so is a bias
        # that a user has added.
        if targets is None or self.bias is not None or type(self.weight) is not nn.Parameter:
            logits = super().forward(hidden)
            return logits if targets is None else mean_cross_entropy(logits.flatten(0, 1), targets.flatten())
        if takes_chunks(self.weight, targets):
            return linear_cross_entropy(hidden, self.weight, targets)
        matrix = whole_tiles(self.weight, computing_type(self.weight))
        logits = functional.linear(hidden, matrix)[..., : self.out_features]
        return mean_cross_entropy(logits.flatten(0, 1), targets.flatten())

    def may_give_loss(self) -> bool:
        """Whether whoever hooks this layer takes a loss as well as logits: strategies do, users' hooks may not.

        A matrix cut over ranks has logits only.
        """
        return type(self.weight) is nn.Parameter and "forward" not in vars(self) and not users_hooks(self)


class NormalEmbedding(nn.Embedding):
    """A table whose rows start from a normal distribution of standard deviation `INITIAL_STD`."""

    @override
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class Embedding(NormalEmbedding):
    """Maps tokens to hidden states. A tied output matrix shares the table, `weight`."""

    sequence: SequenceGroup | None = None  # as in the attention

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = NormalEmbedding(config.context, config.width) if learned else None
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `(N, T)` to `(N, T, width)`."""
        hidden = super().forward(tokens)
        if self.positions is not None:
            length = tokens.shape[1]
            first = 0 if self.sequence is None else self.sequence.rank * length
            places = torch.arange(first, first + length, device=tokens.device)
            if self.sequence is not None:  # parts are equally long: the last may be filled up
                places = places.clamp(max=self.positions.num_embeddings - 1)
            hidden = hidden + self.positions(places)
        return cast(Tensor, self.dropout(hidden))


class Block(nn.Module):
    """Attention and MLP, each after a normalisation and in parallel with a shortcut."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.checkpointed = config.checkpoint_activations
        self.attention_norm = _norm(config)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(N, T, width)` to `(N, T, width)`."""

        def compute(hidden: Tensor) -> Tensor:
            hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
            return cast(Tensor, hidden + self.dropout(self.mlp(self.mlp_norm(hidden))))

        if self.checkpointed and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(compute, hidden, use_reentrant=False))
        return compute(hidden)


def gpt_layers(config: GPTConfig, seed: int) -> list[ChainLayer]:
    """Return the layers from int64 tokens `(N, T)` to logits `(N, T, vocab_size)`.

    The initial parameters are GPT-2's (Radford et al. 2019): normal with a standard deviation of 0.02, or less if a
    block writes to the residual stream with them; biases zero; gains one. They depend only on `config` and `seed`, not
    on which layers a process builds.

    Args:
        config: the shape of the network.
        seed: of the initial parameters.
    """
    last = config.layers + 1
    tie = "embedding" if config.tied else None
    output = functools.partial(OutputLayer, config.width, config.vocab_size, bias=False)
    blocks = [
        ChainLayer(seeded(functools.partial(Block, config), seed, index), f"block_{index}", "block")
        for index in range(1, last)
    ]
    return [
        ChainLayer(seeded(functools.partial(Embedding, config), seed, 0), "embedding", "embedding", tie),
        *blocks,
        ChainLayer(seeded(functools.partial(_norm, config), seed, last), "norm", "norm"),
        # A tied output matrix draws what the embedding draws first, so both start equal even in separate processes.
        ChainLayer(seeded(output, seed, 0 if config.tied else last + 1), "output", "output", tie),
    ]


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
