"""Lists VM sizes with their GPUs and links, and the speed that the planner expects of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from azureml_strategy.cluster.job import Price
from azureml_strategy.gpus import gpu_of
from azureml_strategy.network.vm_sizes import VMSize, known_vm_sizes
from azureml_strategy.planning.candidates import PriceOf, best_precision
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.predict import predict

# What is expected of: images of ResNet-50 with 256 on each GPU, and tokens of a 7B GPT with 4,096 on each GPU.
_IMAGES, _SEQUENCES, _TOKENS = 256, 4, 1024


@dataclass(frozen=True)
class SizeRow:
    """A VM size and what the planner expects of one of it.

    Attributes:
        size: as in the table.
        price: of one; None if it is not known.
        images_per_second: of ResNet-50, eager, under DDP.
        tokens_per_second: of a 7B GPT, compiled, sharded by FSDP2.
        across_gb: bus bandwidth that is expected between two of it, in GB/s.
        note: why there is no expectation.
    """

    size: VMSize
    price: Price | None
    images_per_second: float | None
    tokens_per_second: float | None


def list_sizes(gpu: str | None, infiniband: bool, price_of: PriceOf, retired: bool = False) -> list[SizeRow]:
    """List the GPU sizes of the table.

    Args:
        gpu: only those of this model, such as `H100`.
        infiniband: only those with InfiniBand that a VM can use.
        price_of: the price of a node.
        retired: also those that Azure no longer offers.

    Raises:
        PlanError: no size has the model.
    """
    sizes = [each for each in known_vm_sizes() if each.gpus and (retired or not each.retired)]
    if gpu is not None:
        models = sorted({each.gpu_model for each in sizes if each.gpu_model})
        sizes = [each for each in sizes if (each.gpu_model or "").lower() == gpu.lower()]
        if not sizes:
            raise PlanError(f"No size has a GPU called {gpu!r}. There are: {', '.join(models)}.")
    return [_row(each, price_of(each)) for each in sizes if each.infiniband or not infiniband]


def _row(size: VMSize, price: Price | None) -> SizeRow:
    return SizeRow(size, price, _images(size), _tokens(size))


def _images(size: VMSize) -> float | None:
    gpu = gpu_of(size)
    if gpu is None:
        return None
    found = predict("resnet50", batch_size=_IMAGES, vm_size=size.name, precision=best_precision(gpu), optimizer="sgd")
    return found.samples_per_second


def _tokens(size: VMSize) -> float | None:
    gpu = gpu_of(size)
    if gpu is None:
        return None
    found = predict(
        "gpt_7b",
        batch_size=_SEQUENCES,
        vm_size=size.name,
        precision=best_precision(gpu),
        compiled=True,
        strategy="model_parallel",
    )
    return _TOKENS * found.samples_per_second


def size_lines(rows: Sequence[SizeRow]) -> tuple[list[str], list[list[str | None]]]:
    """Headings and texts of a table."""
    headings = [
        *("size", "GPUs", "memory", "inside", "InfiniBand", "GB/s, one node", "GB/s, two nodes", "Ethernet"),
        *("price/h", "ResNet-50 images/s", "GPT 7B tokens/s"),
    ]
    return headings, [_texts(each) for each in rows]


def _texts(row: SizeRow) -> list[str | None]:
    size = row.size
    links = f"{size.hcas} x {size.hca_gbps} Gb/s" if size.hcas and size.sr_iov else None
    return [
        size.name,
        f"{size.gpus} {size.gpu_model}",
        f"{size.gpu_memory_gb:g} GB" if size.gpu_memory_gb else None,
        size.interconnect,
        links,
        f"{size.bus_bandwidth:g}" if size.bus_bandwidth else None,
        f"{size.bus_bandwidth_two_nodes:g}" if size.bus_bandwidth_two_nodes else None,
        f"{size.ethernet_gbps:g} Gb/s" if size.ethernet_gbps else None,
        f"{row.price.per_hour:,.2f} {row.price.currency}" if row.price else None,
        f"{row.images_per_second:,.0f}" if row.images_per_second else None,
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else None,
    ]
