"""What is forked from the tests' own process, as the workers of a data loader are."""

from __future__ import annotations

import gc
import multiprocessing

import torch.distributed as dist


def test_a_forked_worker_does_not_collect_what_earlier_tests_have_left() -> None:
    gc.collect()
    gc.disable()  # until the worker is there, nothing here collects it either
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        left: list[object] = [dist.group.WORLD]
        left.append(left)  # as a Trainer, its strategy and DDP refer to one another
        dist.destroy_process_group()
        del left
        worker = multiprocessing.get_context("fork").Process(target=gc.collect)
        worker.start()
    finally:
        gc.enable()
    worker.join(60)
    if worker.exitcode is None:
        worker.kill()
        worker.join()
    assert worker.exitcode == 0, "it hung, or died, when it ended a process group that has no threads there"
