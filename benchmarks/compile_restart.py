"""How long a training whose blocks are compiled takes to its first step, before and after its node was lost.

    python benchmarks/compile_restart.py

A GPT whose blocks torch compiles trains for two steps, each time in a new process with an empty disk of its own, as a
new node has it. In each round comes a first start, which also leaves what torch itself can save
(`torch.compiler.save_cache_artifacts`). Then come, in an order that turns, a start that has the job's `compile_cache`,
one that loads torch's artifacts instead, and one whose compiler has nothing to do, as nothing is compiled. Times are
from the start of the process to the end of the first step, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import RESULTS, interleave, ratios, save, show, spread

TARGET = 0.5
FIRST, SECOND, TORCHS, EAGER = "first start", "second start", "second start, torch's artifacts", "not compiled"
SWITCH = "AZUREML_STRATEGY_COMPILE_CACHE"
_COUNTERS = {"inductor": "fxgraph_cache_miss", "aot_autograd": "autograd_cache_miss"}
Start = dict[str, Any]


def train(options: argparse.Namespace) -> None:
    """Train in this process, and print what it took to the end of the first step."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from azureml_strategy.models import GPTConfig, LanguageModel

    artifacts = options.root.with_suffix(".artifacts")
    if options.train == TORCHS:
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())

    class FirstStep(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 0:
                print(json.dumps(_taken(options.started)), flush=True)

    class Compiled(LanguageModel):
        def configure_model(self) -> None:
            super().configure_model()
            for block in () if options.train == EAGER else self.sharded_blocks():
                block.compile()

    config = GPTConfig(256, 64, layers=options.layers, width=64, heads=4, mlp_width=128)
    trainer = Trainer(
        strategy="azureml_ddp",
        accelerator="cpu",
        devices=1,
        max_steps=2,
        default_root_dir=options.root,
        callbacks=[FirstStep()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(256, (16, 65))
    trainer.fit(Compiled(config, seed=1), DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4))
    if options.train == FIRST:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        artifacts.write_bytes(saved[0])


def _taken(started: float) -> Start:
    """What this process and its compilers have taken since `started`, a time of the system's clock."""
    from torch._dynamo.utils import counters

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "wall_s": time.time() - started,
        "cpu_s": sum(each.ru_utime + each.ru_stime for each in used),
        "graphs_compiled": sum(counters[kind][name] for kind, name in _COUNTERS.items()),
    }


def start(case: str, root: Path, layers: int) -> Start:
    """Train in a new process, on an empty disk."""
    with tempfile.TemporaryDirectory(prefix="node_") as disk:
        environ = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        environ |= {"TMPDIR": disk, "AZUREML_RUN_ID": "compile_restart", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environ |= {} if case in (FIRST, SECOND) else {SWITCH: "off"}
        command = [sys.executable, __file__, "--train", case, "--root", str(root), "--layers", str(layers)]
        command += ["--started", repr(time.time())]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


def rounds(count: int, layers: int) -> dict[str, list[Start]]:
    """The starts of each round: the first one, and the others that go on from what it has left."""
    found: dict[str, list[Start]] = {name: [] for name in (FIRST, SECOND, TORCHS, EAGER)}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(count):
            root = Path(folder, str(turn))
            found[FIRST].append(start(FIRST, root, layers))
            cases = {name: partial(start, name, root, layers) for name in (SECOND, TORCHS, EAGER)}
            turned = cases if turn % 2 == 0 else dict(reversed(cases.items()))
            for name, values in interleave(turned, rounds=1, warmup=0).items():
                found[name] += values
    return found


def measure(count: int, layers: int) -> dict[str, Any]:
    """Times of each case, and beside the first start of the same round."""
    found = rounds(count, layers)
    figures: dict[str, Any] = {"graphs_compiled": {name: found[name][0]["graphs_compiled"] for name in found}}
    for kind in ("wall_s", "cpu_s"):
        values = {name: [float(each[kind]) for each in starts] for name, starts in found.items()}
        figures[kind] = {name: spread(each) for name, each in values.items()}
        figures[f"{kind}_ratio"] = {name: ratios(each, values[FIRST]) for name, each in values.items()}
    ratio = figures["wall_s_ratio"][SECOND].median
    return {**figures, "target": {"figure": f"wall_s_ratio/{SECOND}", "at_most": TARGET, "met": ratio <= TARGET}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="of four starts each")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model, which share their compiled code")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write compile_restart.json into")
    for hidden, kind in {"--train": str, "--root": Path, "--started": float}.items():
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options)
    figures = measure(options.rounds, options.layers)
    save("compile_restart", {"rounds": options.rounds, "layers": options.layers}, figures, options.results)
    rows = [
        [name, str(figures["graphs_compiled"][name]), figures["wall_s"][name].text(), figures["cpu_s"][name].text()]
        + [figures[f"{kind}_ratio"][name].text(digits=2) for kind in ("wall_s", "cpu_s")]
        for name in figures["wall_s"]
    ]
    columns = ["to the end of step 1", "graphs compiled", "wall, s", "CPU, s", "wall / first", "CPU / first"]
    show("A new process on a new node: median (quartiles)", columns, rows)
    return None


if __name__ == "__main__":
    main()
