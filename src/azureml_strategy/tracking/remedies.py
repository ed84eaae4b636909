"""Advises what to do about each part of a run's time: which key of the recipe to set, or what to write in a script."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_strategy.tracking.timing.stragglers import ONE_MACHINE

GOOD_MFU = 0.4
"""What large, well-tuned trainings reach: 38 to 43 % (Llama 3, https://arxiv.org/abs/2407.21783), 46 % (PaLM,
https://arxiv.org/abs/2204.02311)."""
SETTINGS = ("pin_memory", "asynchronous", "gradient_compression", "bucket_cap_mb")
"""What a run may have set already: of its loader, its checkpoints and its strategy."""
FUSED = ("Adam", "AdamW", "SGD")
"""Optimizers of torch that take `fused=True` on a CPU and on a GPU."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run besides its times: the number of measured steps, the cost so far, and more.

    A field that is not known keeps its default.

    Attributes:
        loader_workers: of the training loader of each rank.
        strategy: Lightning's or our name of the strategy, or its class.
        transport: between nodes, as in the tag `network.transport`.
        precision: as the Trainer takes it, such as `bf16-mixed`.
        optimizer: class of the optimizer, such as `SGD`, or `SGD(fused=True)` if it is fused already.
        hook: the one that took most of the part `other` of the steps, such as `Ema.on_train_batch_end, 4.1 ms a call`.
        mfu: model FLOPs utilisation, 0 to 1.
        compiled: whether the module or parts of it are compiled, by `strategy.compile` or by torch.compile.
        replays: whether they replay CUDA graphs, by `strategy.compile_mode`.
        keys: of the recipe, such as `data.num_workers`; None for a script, to which no key is named.
        slow_ranks: each rank that holds up the others, in words: `rank 3 (node-1, cuda:0)`.
        slow_share: part of a step for which the others wait for the slow ranks, 0 to 1.
        one_machine: whether all ranks share the cores of one machine, as those of emulated nodes do.
        settings: those of `SETTINGS` that the run has already, so that they are not advised.
    """

    loader_workers: int | None = None
    strategy: str = ""
    transport: str = ""
    nodes: int = 1
    precision: str = ""
    optimizer: str = ""
    hook: str = ""
    mfu: float | None = None
    compiled: bool = False
    replays: bool = False
    keys: frozenset[str] | None = None
    slow_ranks: tuple[str, ...] = ()
    slow_share: float = 0.0
    steps: int | None = None
    one_machine: bool = False
    settings: frozenset[str] = frozenset()
    cost: float | None = None
    currency: str = "USD"

    def way(self, key: str, value: str, otherwise: str) -> str:
        """What to set: the recipe's key, with a value unless that is empty; `otherwise` where there is no such key."""
        if self.keys is None or key not in self.keys:
            return otherwise
        return f"{key}={value}" if value else key

    def can(self, key: str) -> bool:
        """Whether this can be set: by the key of a recipe that has it, or in any script."""
        return self.keys is None or key in self.keys


def _data_wait(facts: RunFacts) -> tuple[str, str]:
    workers = facts.loader_workers
    if workers == 0:
        why = "The loader has no workers, so batches are prepared between the steps."
        way = facts.way("data.num_workers", "4", "DataLoader(num_workers=4, persistent_workers=True)")
        return why, f"Give it workers: {way}."
    many = "the loader" if workers is None else f"the loader, with {workers} worker{'s' * (workers > 1)} a rank,"
    return (
        f"The device is idle while {many} prepares the next batch.",
        f"Raise {facts.way('data.num_workers', '', 'the num_workers of the DataLoader')}, and read from the node's own "
        "disk or from packed files instead of many small ones.",
    )


def _copy(facts: RunFacts) -> tuple[str, str]:
    why = "Batches are copied while nothing computes."
    if "pin_memory" in facts.settings or not facts.can("data.pin_memory"):  # our data modules pin by themselves
        return why, "Send smaller data: uint8 images, normalized on the device."
    pin = facts.way("data.pin_memory", "true", "pin_memory=True in the DataLoader")
    return why, f"Set {pin}, and send smaller data: uint8 images, normalized on the device."


def _profile(facts: RunFacts) -> str:
    return facts.way("profile.steps", "", "The callback ProfileSteps")


def _host(facts: RunFacts) -> tuple[str, str]:
    why = "In forward and backward the GPU has done what it was given, and waits for Python to launch the next kernels."
    ways = []
    if not facts.compiled:
        ways += _compile(facts)
    elif "ddp" in facts.strategy.lower() and not facts.replays and facts.can("strategy.compile_mode"):
        mode = facts.way(
            "strategy.compile_mode", "reduce-overhead", 'AzureMLDDPStrategy(..., compile_mode="reduce-overhead")'
        )
        ways.append(f"replay CUDA graphs ({mode})")
    ways.append(f"make the batch larger{_batch_size(facts)}")
    ways.append("call fewer hooks and small operations in forward")
    return why, f"{_sentence(ways)} {_profile(facts)} shows what is launched."


def _compile(facts: RunFacts) -> list[str]:
    """How to compile the model; nothing under a strategy of which the recipe has no such key."""
    if not facts.can("strategy.compile"):
        return []
    in_script = 'AzureMLDDPStrategy(compile="blocks")' if "ddp" in facts.strategy.lower() else "torch.compile"
    return [f"compile the model ({facts.way('strategy.compile', 'blocks', in_script)})"]


def _batch_size(facts: RunFacts) -> str:
    return " (data.batch_size)" if facts.keys and "data.batch_size" in facts.keys else ""


def _sentence(ways: list[str]) -> str:
    """What to try, the first way first."""
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _communication(facts: RunFacts) -> tuple[str, str]:
    if facts.one_machine:
        return "Nothing computes while gradients are under way between processes that share one machine.", ONE_MACHINE
    why = "Nothing computes while gradients are under way, so the network is slower than the backward pass."
    compress = _compress(facts)
    if facts.nodes > 1 and facts.transport in ("socket", "roce", "ofi"):
        why = f"Traffic between nodes goes over {facts.transport} and not over InfiniBand."
        other = f" Else compress: {compress}" if compress else ""
        return why, f"Run `azureml-strategy doctor`, or take a VM size with InfiniBand.{other}"
    if compress:
        return why, f"Compress the gradients: {compress} Larger batches talk less often."
    way = "Larger batches talk less often; what talks most belongs inside a node."
    return why, f"{way} Check the links with `azureml-strategy bench`."


def _compress(facts: RunFacts) -> str:
    """How to send less under DDP; empty under what has no such settings."""
    is_open = "ddp" in facts.strategy.lower() and facts.can("strategy.gradient_compression")
    if not is_open or "gradient_compression" in facts.settings:
        return ""
    less = facts.way("strategy.gradient_compression", "bf16", 'AzureMLDDPStrategy(gradient_compression="bf16")')
    if "bucket_cap_mb" in facts.settings:
        return f"{less}."
    return f"{less}, and larger buckets: {facts.way('strategy.bucket_cap_mb', '100', 'bucket_cap_mb=100')}."


def _optimizer(facts: RunFacts) -> tuple[str, str]:
    why = "The update of the weights takes long beside forward and backward."
    if not facts.optimizer:
        known = f"with torch's {', '.join(FUSED[:-1])} or {FUSED[-1]} that is fused=True"
        return why, f"Use a fused optimizer ({known}), or larger batches, so that there are fewer updates."
    if facts.optimizer in FUSED:
        fused = facts.way("model.fused", "true", f"{facts.optimizer}(fused=True) in configure_optimizers")
        return why, f"Use {fused}, or larger batches, so that there are fewer updates."
    return why, "Use larger batches, so that there are fewer updates."


def _other(facts: RunFacts) -> tuple[str, str]:
    if facts.hook:
        return "Most of this time is in one hook.", f"Look at {facts.hook}: have it do less, or only every few steps."
    return (
        "This time is between the parts: callbacks, loggers, `.item()` calls and other Python.",
        f"Log less often ({facts.way('trainer.log_every_n_steps', '', 'log_every_n_steps of the Trainer')}). "
        f"{_profile(facts)} shows the callback that takes long.",
    )


def slow_rank(facts: RunFacts) -> tuple[str, str]:
    """Why the others wait for a slow rank, and what to try."""
    why = "The other ranks stand in a collective until the slow one arrives."
    if facts.one_machine:
        return why, ONE_MACHINE
    return (
        why,
        "Run `azureml-strategy doctor` and `azureml-strategy bench --pairs` on these nodes, and replace the slow one.",
    )


def computing(facts: RunFacts) -> tuple[str, str]:
    """Why a device computes slowly, and what to try."""
    ways = []
    if "16" not in facts.precision:
        ways.append(f"use {facts.way('trainer.precision', 'bf16-mixed', 'precision=bf16-mixed')}")
    if not facts.compiled:
        ways += _compile(facts)
    ways.append(f"make the batch larger{_batch_size(facts)} until memory is full")
    return (
        f"Large language models get {GOOD_MFU:.0%} of a device's peak; a network that memory bounds gets less of it, "
        "whatever is done.",
        _sentence(ways),
    )


def step_remedies(facts: RunFacts) -> dict[str, tuple[str, str]]:
    """By the part of a step: why it takes long, and what to try."""
    micro_batches = facts.way("strategy.micro_batches", "", "micro_batches")
    return {
        "data_wait": _data_wait(facts),
        "copy": _copy(facts),
        "forward_wait": (
            "The training thread sleeps in training_step, which sends no gradients: it waits for files, a process, a "
            "lock, or for other ranks in a collective of its own or of the strategy.",
            "Move reading into the data set, and use self.log(sync_dist=True) once an epoch. "
            f"{_profile(facts)} shows where.",
        ),
        "host": _host(facts),
        "communication": _communication(facts),
        "bubble": (
            "The stages have nothing to do while the pipeline fills and drains.",
            f"Cut the batch into more micro-batches ({micro_batches}), or use fewer stages.",
        ),
        "optimizer": _optimizer(facts),
        "other": _other(facts),
    }


def run_remedies(facts: RunFacts) -> dict[str, tuple[str, str]]:
    """By the part of the run: why it takes long, and what to try."""
    minutes = facts.way("checkpoint.every_minutes", "", "every_minutes of JobCheckpoint")
    background = facts.way("checkpoint.asynchronous", "true", "JobCheckpoint(asynchronous=True)")
    has_choice = "asynchronous" not in facts.settings and facts.can("checkpoint.asynchronous")
    less_often = facts.way("trainer.check_val_every_n_epoch", "", "check_val_every_n_epoch of the Trainer")
    fewer = facts.way("trainer.limit_val_batches", "", "limit_val_batches")
    return {
        "startup": (
            "Imports, data and the first batches come before the first step, on nodes that are already paid for.",
            "Cache what is prepared at the start, and avoid restarts of short jobs.",
        ),
        "validation": (
            "The weights do not change while the run validates.",
            f"Validate less often ({less_often}) or on fewer batches ({fewer}).",
        ),
        "checkpoint": (
            "Training stands still while checkpoints are taken.",
            f"Save less often ({minutes}){f', and in the background: {background}' if has_choice else ''}.",
        ),
        "redone": (
            "After a restart, steps since the last checkpoint were computed a second time.",
            f"Save more often ({minutes}), so that a restart repeats less.",
        ),
        "other": (
            "This time is outside of steps, validation and checkpoints.",
            "Look at the hooks at the ends of epochs, and at what runs after fit.",
        ),
    }
