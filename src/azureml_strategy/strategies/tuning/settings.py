"""The settings of DDP that decide how it communicates, what each may cost in accuracy, and which are worth a trial."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from azureml_strategy.strategies.compression import Compression
from azureml_strategy.strategies.errors import ConfigurationError

_MIB = 2**20
# In MiB. Torch's own default is a first bucket of 1 and then 25. Between two of these the step time hardly differs.
_BUCKETS_MB = (5, 25, 100)
_FIRST_BUCKET_MB = 1
COMPRESSIONS: tuple[Compression, ...] = ("bf16", "fp16", "powersgd")
"""All of them."""
_COSTS = {
    "bf16": "gradients rounded to 8 bits of mantissa",
    "fp16": "gradients rounded to 11 bits of mantissa, and infinite above 65,504",
    "powersgd": "gradients of low rank, with error feedback: another optimization",
}
_NO_COST = "none: the same sums, in another order at most"
_STATIC_COST = "none, if each step uses the same parameters; wrong gradients otherwise"


@dataclass(frozen=True)
class Settings:
    """How DDP communicates.

    Attributes:
        bucket_cap_mb: size of a bucket of gradients in MiB; None for torch's default, 25 after a first one of 1.
        first_bucket_mb: size of the first bucket to be sent, in MiB; None for that of the others.
        static_graph: whether torch may take it that each step uses the same parameters.
        gradient_as_bucket_view: whether gradients lie in the buckets, which saves a copy.
        gradient_compression: `bf16`, `fp16` or `powersgd`; None sends gradients as they are.
        powersgd_rank: rank of PowerSGD's factors.
    """

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = None
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    gradient_compression: Compression | None = None
    powersgd_rank: int = 1

    @property
    def accuracy_cost(self) -> str:
        """What these settings change in the results."""
        if self.gradient_compression is not None:
            return _COSTS[self.gradient_compression]
        return _STATIC_COST if self.static_graph else _NO_COST

    @property
    def lossless(self) -> bool:
        """Whether the gradients are those of stock DDP for every model."""
        return self.gradient_compression is None and not self.static_graph

    def arguments(self) -> dict[str, Any]:
        """The arguments of DistributedDataParallel.

        Raises:
            ConfigurationError: this torch has no first bucket of its own size.
        """
        given: dict[str, Any] = {"gradient_as_bucket_view": self.gradient_as_bucket_view}
        if self.static_graph:
            given["static_graph"] = True
        if self.first_bucket_mb is None:
            return given if self.bucket_cap_mb is None else given | {"bucket_cap_mb": self.bucket_cap_mb}
        if not sizes_first_bucket():
            raise ConfigurationError(
                f"first_bucket_mb={self.first_bucket_mb} needs a torch whose DistributedDataParallel has "
                "bucket_cap_mb_list. Leave it out, or update torch."
            )
        # The last size is that of all further buckets. Torch's default is 25.
        return given | {"bucket_cap_mb_list": [self.first_bucket_mb, self.bucket_cap_mb or 25]}

    def words(self) -> str:
        """In a few words: `bucket 25 MiB, bf16`."""
        size = "torch's buckets" if self.bucket_cap_mb is None else f"buckets of {self.bucket_cap_mb:g} MiB"
        words = [size]
        if self.first_bucket_mb is not None:
            words.append(f"the first of {self.first_bucket_mb:g}")
        if self.gradient_compression is not None:
            rank = f" of rank {self.powersgd_rank}" if self.gradient_compression == "powersgd" else ""
            words.append(f"{self.gradient_compression}{rank}")
        if self.static_graph:
            words.append("static graph")
        if not self.gradient_as_bucket_view:
            words.append("gradients copied")
        return ", ".join(words)

    def to_plain(self) -> dict[str, Any]:
        """As `AzureMLDDPStrategy(...)` takes them."""
        return asdict(self)


def sizes_first_bucket() -> bool:
    """Whether this torch lets the first bucket have a size of its own beside others than torch's default."""
    return "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters


def allowed_compressions(lossy: bool | str | Sequence[str]) -> tuple[Compression, ...]:
    """The compressions that a user allows.

    Args:
        lossy: all of them, none, or their names.

    Raises:
        ConfigurationError: a name is unknown.
    """
    if isinstance(lossy, bool):
        return COMPRESSIONS if lossy else ()
    names = [lossy] if isinstance(lossy, str) else list(lossy)
    unknown = [each for each in names if each not in COMPRESSIONS]
    if unknown:
        raise ConfigurationError(
            f"tune_lossy has {unknown[0]!r}, which is no compression. Give True or some of {', '.join(COMPRESSIONS)}."
        )
    return tuple(each for each in COMPRESSIONS if each in names)


def compressions(base: Settings, allowed: Sequence[Compression]) -> list[Settings]:
    """The settings with each other compression that is allowed, and with none."""
    return [replace(base, gradient_compression=each) for each in (None, *allowed) if each != base.gradient_compression]


def bucket_sizes(base: Settings, gradient_bytes: int) -> list[Settings]:
    """The settings with other sizes of buckets, none of which is larger than all gradients.

    Args:
        base: the settings otherwise.
        gradient_bytes: of all gradients of the module.
    """
    whole = max(1, -(-gradient_bytes // _MIB))
    sizes = [None, *(size for size in _BUCKETS_MB if size < whole), whole]
    others = [replace(base, bucket_cap_mb=size, first_bucket_mb=None) for size in sizes]
    return [each for each in others if each != base]


def first_buckets(base: Settings) -> list[Settings]:
    """The settings with a first bucket of another size: a small one is sent sooner."""
    if base.bucket_cap_mb is None or base.bucket_cap_mb <= _FIRST_BUCKET_MB or not sizes_first_bucket():
        return []
    return [replace(base, first_bucket_mb=_FIRST_BUCKET_MB if base.first_bucket_mb is None else None)]


def copied_gradients(base: Settings) -> list[Settings]:
    """The settings with gradients beside the buckets.

    Not the other way round: who copies them may have a hook or an optimizer that cannot do with views.
    """
    return [replace(base, gradient_as_bucket_view=False)] if base.gradient_as_bucket_view else []


def static_graphs(base: Settings) -> list[Settings]:
    """The settings with a static graph; only on request, as one batch does not show whether a graph is static."""
    return [] if base.static_graph else [replace(base, static_graph=True)]
