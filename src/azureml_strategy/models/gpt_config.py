"""The configuration of a GPT, and its number of parameters and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rotary", "learned"]
MLP = Literal["swiglu", "gelu"]


@dataclass(frozen=True)
class GPTConfig:
    """A decoder whose blocks normalise before each of their two parts, as in GPT-2 and Llama.

    Args:
        vocab_size: number of different tokens.
        context: tokens of the longest sequence. Learned positions end there; rotary ones do not.
        layers: number of blocks.
        width: of the hidden states.
        heads: of the queries; each is `width / heads` wide.
        mlp_width: of the hidden states inside an MLP.
        kv_heads: of keys and values, each shared by `heads / kv_heads` query heads (Ainslie et al. 2023,
            https://arxiv.org/abs/2305.13245); None for as many as `heads`.
        norm: `rmsnorm` (Zhang and Sennrich 2019) or `layernorm`.
        positions: `rotary` (Su et al. 2021), applied to queries and keys, or `learned`, added to the embeddings.
        mlp: `swiglu` (Shazeer 2020), three matrices, or `gelu`, two, with the tanh approximation of GPT-2.
        tied: use the embedding table as the output matrix.
        bias: of the linear layers in the blocks, and of LayerNorm.
        dropout: of the embeddings, of attention and of the output of each part of a block; 0 for none.
        norm_eps: added to the variance, or to the mean square.
        rotary_base: longest wavelength of the rotary positions over 2 pi, in tokens.
        checkpoint_activations: keep only the input of each block and recompute the rest in the backward pass: about a
            third more computation for a fraction of the memory.

    Raises:
        ValueError: the values do not fit together.
    """

    vocab_size: int
    context: int
    layers: int
    width: int
    heads: int
    mlp_width: int
    kv_heads: int | None = None
    norm: Norm = "rmsnorm"
    positions: Positions = "rotary"
    mlp: MLP = "swiglu"
    tied: bool = True
    bias: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rotary_base: float = 10_000.0
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "width", "heads", "mlp_width", "key_value_heads"):
            self._require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be 1 or more")
        self._require(self.width % self.heads == 0, f"width={self.width} does not divide by heads={self.heads}")
        groups = f"heads={self.heads} does not divide by kv_heads={self.kv_heads}"
        self._require(self.heads % self.key_value_heads == 0, groups)
        odd = f"rotary positions turn pairs of numbers, and width / heads = {self.head_width} is odd"
        self._require(self.positions != "rotary" or self.head_width % 2 == 0, odd)
        self._require(0 <= self.dropout < 1, f"dropout={self.dropout} must be from 0 to less than 1")
        for name, choices in (("norm", Norm), ("positions", Positions), ("mlp", MLP)):
            known = get_args(choices)
            self._require(getattr(self, name) in known, f"{name}={getattr(self, name)!r} must be one of {known}")

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Size of a query, key or value of one head."""
        return self.width // self.heads

    def parameters(self) -> int:
        """Number of trained parameters of the whole network; a tied matrix counts once."""
        positions = self.context * self.width if self.positions == "learned" else 0
        table = self.vocab_size * self.width
        return table * (1 if self.tied else 2) + positions + self.layers * self._block() + self._norm()

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of a forward and backward pass for one token, `6 N + 12 L H Q T`.

        The formula is from Chowdhery et al. 2022, appendix B (https://arxiv.org/abs/2204.02311). N excludes parameters
        that are looked up and not multiplied: learned positions, and an embedding table that is not the output matrix
        as well. Recomputation by `checkpoint_activations` does not count. Attention counts as if it were not causal.

        Args:
            sequence_length: T, tokens that attend to one another.
        """
        multiplied = self.vocab_size * self.width + self.layers * self._block() + self._norm()
        return 6 * multiplied + 12 * self.layers * self.width * sequence_length

    def _block(self) -> int:
        keys_and_values = 2 * self.key_value_heads * self.head_width
        matrices = 3 if self.mlp == "swiglu" else 2
        weights = self.width * (2 * self.width + keys_and_values + matrices * self.mlp_width)
        biases = 3 * self.width + keys_and_values + (matrices - 1) * self.mlp_width if self.bias else 0
        return weights + biases + 2 * self._norm()

    def _norm(self) -> int:
        return 2 * self.width if self.norm == "layernorm" and self.bias else self.width

    def _require(self, valid: bool, wrong: str) -> None:
        if not valid:
            raise ValueError(f"No such GPT: {wrong}.")
