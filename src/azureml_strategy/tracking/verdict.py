"""Says what a run waits for most, why, what to try, and what that gains at most.

`judge` takes shares and seconds as the run logs them (`step/..._share`, `time/..._s`) and returns a `Verdict`. The
table at the end of a run, its tag `azureml_strategy.verdict` and its page show the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from azureml_strategy.cluster.job import format_money

# A smaller part is not worth a change: it is within the spread between two runs of the same configuration.
_WORTH_IT = 0.05
# Start-up is the same for a short and a long run, so it says nothing about a run that was only tried out.
_LONG_RUN_S = 600.0
GOOD_MFU = 0.4
"""What large, well-tuned trainings reach: 38 to 43 % (Llama 3, https://arxiv.org/abs/2407.21783), 46 % (PaLM,
https://arxiv.org/abs/2204.02311)."""
FUSED = ("Adam", "AdamW", "SGD")
"""Optimizers of torch that take `fused=True` on a CPU and on a GPU."""
_WAITING = ("data_wait", "copy", "forward_wait", "host", "communication", "bubble", "optimizer", "other")
_COMPUTING = ("forward", "backward")
# Keys that advice on a run's parts names. A script has arguments of the same names.
_RUN_KEYS = frozenset(
    {
        *("trainer.check_val_every_n_epoch", "trainer.limit_val_batches"),
        *("checkpoint.every_minutes", "checkpoint.asynchronous"),
    }
)
_OUTSIDE = ("startup", "validation", "checkpoint", "redone", "other")

NAMES: Mapping[str, str] = {
    "data_wait": "waiting for data",
    "copy": "copying to the device",
    "forward": "forward",
    "forward_wait": "waiting in forward",
    "backward": "backward",
    "host": "waiting for the host",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "other": "loggers, callbacks, Python",
}
"""What a part of the step is called, by its name in `step/NAME_share`, in the order in which a step has them."""

PHASES: Mapping[str, str] = {
    "startup": "start-up",
    "training": "training",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "redone": "work done again",
    "other": "everything else",
}
"""What a part of the run is called, by its name in `time/NAME_s`."""


def mfu_text(mfu: float) -> str:
    """A utilisation with two significant digits: `0.42%`, `17%`."""
    percent = 100 * mfu
    digits = 1 - math.floor(math.log10(percent)) if percent > 0 else 0
    return f"{percent:.{max(digits, 0)}f}%"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run besides its times. A field that is not known keeps its default.

    Attributes:
        loader_workers: workers of the training loader of each rank.
        strategy: Lightning's or our name of the strategy, or its class.
        transport: what carries the traffic between nodes, as in the tag `network.transport`.
        nodes: number of nodes.
        precision: as the Trainer takes it, such as `bf16-mixed`.
        optimizer: class of the optimizer, such as `SGD`, or `SGD(fused=True)` if it is fused already.
        hook: that most of what belongs to no other part of a step went into: `Ema.on_train_batch_end, 4.1 ms a call`.
        mfu: model FLOPs utilisation, 0 to 1.
        compiled: whether torch.compile is used for the module or parts of it.
        keys: of the recipe, such as `data.num_workers`; None for a script, to which no key is named.
        slow_ranks: each rank that holds up the others, in words: `rank 3 (node-1, cuda:0)`.
        slow_share: part of a step for which the others wait for the slow ranks, 0 to 1.
        cost: of the run so far.
        currency: of `cost`.
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
    keys: frozenset[str] | None = None
    slow_ranks: tuple[str, ...] = ()
    slow_share: float = 0.0
    cost: float | None = None
    currency: str = "USD"

    def way(self, key: str, value: str, otherwise: str) -> str:
        """How to set something here: by its key where the recipe has it, else in Python.

        Args:
            key: of a recipe.
            value: to set; empty if only the key is named.
            otherwise: what a script writes.
        """
        if self.keys is None or key not in self.keys:
            return otherwise
        return f"{key}={value}" if value else key

    def can(self, key: str) -> bool:
        """Whether something that has this key in recipes can be done here: in a script, or by the key."""
        return self.keys is None or key in self.keys


@dataclass(frozen=True)
class Advice:
    """A part of the time that something can be done about.

    Attributes:
        part: its name: a part of the step, a part of the run (`startup`, ...), `slow_rank` or `computing`.
        share: the part of the run's time that would be gone if this were gone entirely, 0 to 1.
        what: what takes this time, with its share: `data: 41% of each step`.
        why: one sentence.
        action: what to try: one or two sentences.
        saving: money that the run would have saved at most, with its currency; empty if the cost is not known.
        is_bound: whether `share` is known to bound the gain. What a network can reach at most is not known.
    """

    part: str
    share: float
    what: str
    why: str
    action: str
    saving: str = ""
    is_bound: bool = True

    @property
    def speed_up(self) -> float:
        """How many times as fast the run would be at most, by Amdahl's law with an infinitely fast part."""
        return 1 / (1 - min(self.share, 0.99))

    @property
    def gain(self) -> str:
        """The gain in percent and money, as a sentence; empty if nothing bounds it."""
        if not self.is_bound:
            return ""
        percent = 100 * (self.speed_up - 1)
        money = f", {self.saving} less for this run" if self.saving else ""
        return f"At most {percent:.0f}% faster{money}."


@dataclass(frozen=True)
class Verdict:
    """What a run waits for most, and what to do about it.

    Attributes:
        headline: one sentence: what the run waits for most, or that it does not wait.
        advice: what to try, the largest wait first and computing last; empty if nothing is worth it, or was measured.
        measured: whether the run says where its time goes.
    """

    headline: str
    advice: tuple[Advice, ...] = field(default=())
    measured: bool = True

    @property
    def part(self) -> str:
        """The name of the part that the run waits for most; empty if there is none."""
        return self.advice[0].part if self.advice else ""

    @property
    def line(self) -> str:
        """The verdict for a console or a tag: the headline, what to try and the gain."""
        first = self.advice[0] if self.advice else None
        return " ".join(filter(None, (self.headline, first.action, first.gain))) if first else self.headline


def judge(
    shares: Mapping[str, float], times: Mapping[str, float] | None = None, facts: RunFacts | None = None
) -> Verdict:
    """Find what a run waits for most.

    Args:
        shares: parts of a step, 0 to 1, by the names in `NAMES`; those that could not be measured are left out.
        times: seconds of the parts of the run, by the names in `PHASES`. Without them the run counts as all training.
        facts: what else is known of the run.
    """
    facts = facts or RunFacts()
    shares = {name: share for name, share in shares.items() if name in NAMES and 0 <= share <= 1}
    times = _counted(times or {})
    if not shares and not times:
        return Verdict("This run did not measure where its time goes.", measured=False)
    found = [*_of_steps(shares, _training_share(times), facts), *_of_run(times, facts)]
    worth = [each for each in found if each.share >= _WORTH_IT]
    worth.sort(key=lambda each: (each.part == "computing", -each.share))
    return Verdict(_headline(worth, shares), tuple(worth))


def _counted(times: Mapping[str, float]) -> dict[str, float]:
    """The seconds that judge a run: without the start-up of a run that was only tried out."""
    known = {name: times[name] for name in PHASES if 0 < times.get(name, 0) < math.inf}
    if sum(known.values()) < _LONG_RUN_S:
        known.pop("startup", None)
    return known


def _training_share(times: Mapping[str, float]) -> float:
    return times.get("training", 0.0) / sum(times.values()) if times else 1.0


def _headline(worth: list[Advice], shares: Mapping[str, float]) -> str:
    if worth and worth[0].part != "computing":
        return f"This run waits most for {worth[0].what}."
    if not worth and set(shares) == {"data_wait"}:
        return f"Data come in time ({shares['data_wait']:.1%} of a step waits for them); nothing else was measured."
    computing = sum(shares.get(name, 0.0) for name in _COMPUTING)
    busy = f"{computing:.0%} of a step computes" if computing else "its steps take nearly all of the time"
    if worth:
        return f"This run waits for nothing; {busy}, but slowly: {worth[0].what}."
    return f"This run waits for nothing that is worth a change: {busy}."


def _of_steps(shares: Mapping[str, float], training: float, facts: RunFacts) -> Iterator[Advice]:
    slow = min(facts.slow_share, shares.get("communication", 1.0)) if facts.slow_ranks else 0.0
    for name in _WAITING:
        # While ranks wait for a slow one, they are in a collective: that part is not the network's fault.
        share = shares.get(name, 0.0) - (slow if name == "communication" else 0.0)
        if share > 0:
            why, action = _STEP_ADVICE[name](facts)
            yield _advice(name, share * training, f"{_WAITED_FOR[name]}: {share:.0%} of each step", why, action, facts)
    if slow:
        yield _slow_rank(slow, training, facts)
    computing = sum(shares.get(name, 0.0) for name in _COMPUTING)
    if facts.mfu is not None and computing > facts.mfu / GOOD_MFU:
        # The step would still take as long as its FLOPs take at a good utilisation.
        share = (computing - facts.mfu / GOOD_MFU) * training
        yield Advice("computing", share, f"MFU is {mfu_text(facts.mfu)}", *_computing(facts), is_bound=False)


def _of_run(times: Mapping[str, float], facts: RunFacts) -> Iterator[Advice]:
    for name in _OUTSIDE:
        if name in times:
            share = times[name] / sum(times.values())
            what = f"{PHASES[name]}: {share:.0%} of its time"
            why, action = _RUN_ADVICE[name]
            for key in _RUN_KEYS - (facts.keys or frozenset()):
                action = action.replace(key, key.partition(".")[2])
            yield _advice(f"run_{name}" if name == "other" else name, share, what, why, action, facts)


def _advice(part: str, share: float, what: str, why: str, action: str, facts: RunFacts) -> Advice:
    saving = "" if not facts.cost else f"{format_money(share * facts.cost)} {facts.currency}"
    return Advice(part, share, what, why, action, saving)


def _slow_rank(share: float, training: float, facts: RunFacts) -> Advice:
    ranks = ", ".join(facts.slow_ranks)
    return _advice(
        "slow_rank",
        share * training,
        f"{ranks}: {share:.0%} of each step",
        "The other ranks stand in a collective until the slow one arrives.",
        "Run `azureml-strategy doctor` and `azureml-strategy bench --pairs` on these nodes, and replace the slow one.",
        facts,
    )


_WAITED_FOR = {
    "data_wait": "data",
    "copy": "copies to the device",
    "forward_wait": "something in training_step",
    "host": "the host to launch kernels",
    "communication": "gradients from other ranks",
    "bubble": "other pipeline stages",
    "optimizer": "the optimizer",
    "other": "loggers, callbacks and Python",
}


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
    return (
        "Batches are copied while nothing computes.",
        "Set pin_memory=True in the DataLoader, and send smaller data: uint8 images, normalized on the device.",
    )


def _forward_wait(facts: RunFacts) -> tuple[str, str]:
    return (
        "The training thread sleeps in training_step, which sends no gradients: it waits for files, a process, a lock, "
        "or for other ranks in a collective of its own.",
        "Move reading into the data set, and use self.log(sync_dist=True) once an epoch. "
        f"{_profile(facts)} shows where.",
    )


def _profile(facts: RunFacts) -> str:
    return facts.way("profile.steps", "", "The callback ProfileSteps")


def _host(facts: RunFacts) -> tuple[str, str]:
    why = "In forward and backward the GPU has done what it was given, and waits for Python to launch the next kernels."
    ways = []
    if not facts.compiled and facts.can("model.compile"):
        ways.append(f"compile the model ({facts.way('model.compile', 'true', 'torch.compile')})")
    elif facts.compiled and facts.keys is None:
        ways.append('replay CUDA graphs (torch.compile with mode="reduce-overhead")')
    ways.append(f"make the batch larger{_batch_size(facts)}")
    ways.append("call fewer hooks and small operations in forward")
    return why, f"{_sentence(ways)} {_profile(facts)} shows what is launched."


def _batch_size(facts: RunFacts) -> str:
    return " (data.batch_size)" if facts.keys and "data.batch_size" in facts.keys else ""


def _sentence(ways: list[str]) -> str:
    """What to try, the first way first."""
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _communication(facts: RunFacts) -> tuple[str, str]:
    why = "Nothing computes while gradients are under way, so the network is slower than the backward pass."
    compress = _compress(facts)
    if facts.nodes > 1 and facts.transport in ("socket", "roce", "ofi"):
        why = f"Traffic between nodes goes over {facts.transport} and not over InfiniBand."
        other = f" Else compress: {compress}" if compress else ""
        return why, f"Run `azureml-strategy doctor`, or take a VM size with InfiniBand.{other}"
    if compress:
        return why, f"Compress the gradients: {compress} Larger batches talk less often."
    return why, "Larger batches talk less often; what talks most belongs inside a node. " + _CHECK_NETWORK


def _compress(facts: RunFacts) -> str:
    """How to send less under DDP; empty under what has no such settings."""
    if "ddp" not in facts.strategy.lower() or not facts.can("strategy.gradient_compression"):
        return ""
    less = facts.way("strategy.gradient_compression", "bf16", 'AzureMLDDPStrategy(gradient_compression="bf16")')
    return f"{less}, and larger buckets: {facts.way('strategy.bucket_cap_mb', '100', 'bucket_cap_mb=100')}."


_CHECK_NETWORK = "Check the links with `azureml-strategy bench`."


def _bubble(facts: RunFacts) -> tuple[str, str]:
    return (
        "The stages have nothing to do while the pipeline fills and drains.",
        f"Cut the batch into more micro-batches ({facts.way('strategy.micro_batches', '', 'micro_batches')}), "
        "or use fewer stages.",
    )


def _optimizer(facts: RunFacts) -> tuple[str, str]:
    why = "The update of the weights takes long beside forward and backward."
    if not facts.optimizer:
        known = f"with torch's {', '.join(FUSED[:-1])} or {FUSED[-1]} that is fused=True"
        return why, f"Use a fused optimizer ({known}), or larger batches, so that there are fewer updates."
    if facts.optimizer in FUSED:
        fused = f"{facts.optimizer}(fused=True) in configure_optimizers"
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


_STEP_ADVICE: Mapping[str, Callable[[RunFacts], tuple[str, str]]] = {
    "data_wait": _data_wait,
    "copy": _copy,
    "forward_wait": _forward_wait,
    "host": _host,
    "communication": _communication,
    "bubble": _bubble,
    "optimizer": _optimizer,
    "other": _other,
}
_RUN_ADVICE: Mapping[str, tuple[str, str]] = {
    "startup": (
        "Imports, data and the first batches come before the first step, on nodes that are already paid for.",
        "Cache what is prepared at the start, and avoid restarts of short jobs.",
    ),
    "validation": (
        "The weights do not change while the run validates.",
        "Validate less often (trainer.check_val_every_n_epoch) or on fewer batches (trainer.limit_val_batches).",
    ),
    "checkpoint": (
        "Training stands still while checkpoints are taken.",
        "Save less often (checkpoint.every_minutes), and in the background: checkpoint.asynchronous=true.",
    ),
    "redone": (
        "After a restart, steps since the last checkpoint were computed a second time.",
        "Save more often (checkpoint.every_minutes), so that a restart repeats less.",
    ),
    "other": (
        "This time is outside of steps, validation and checkpoints.",
        "Look at the hooks at the ends of epochs, and at what runs after fit.",
    ),
}


def _computing(facts: RunFacts) -> tuple[str, str]:
    ways = []
    if "16" not in facts.precision:
        ways.append(f"use {facts.way('trainer.precision', 'bf16-mixed', 'precision=bf16-mixed')}")
    if not facts.compiled and facts.can("model.compile"):
        ways.append(f"compile the model ({facts.way('model.compile', 'true', 'torch.compile')})")
    ways.append(f"make the batch larger{_batch_size(facts)} until memory is full")
    return (
        f"Large language models get {GOOD_MFU:.0%} of a device's peak; a network that memory bounds gets less of it, "
        "whatever is done.",
        _sentence(ways),
    )
