"""Averages flat tensors over all ranks beside the training, as they are or in fewer bits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

# Numbers that share a scale: 4 bytes for 1,024.
_BLOCK = 1024
_INT8_MOST = 127


class RanksApartError(RuntimeError):
    """The ranks have come to one exchange from different steps. Raised on all of them."""


class Exchanges:
    """Runs collectives one after another beside the training. Every rank begins the same ones in the same order.

    They have a process group of their own, so that they do not mix with the collectives of the training.

    gloo's run on a thread, because they block their caller. It is a daemon: if other ranks are gone, a collective may
    last until its timeout, and the interpreter must not wait for it.

    NCCL's are queued on a stream of their own by the thread that trains. NCCL may deadlock unless all ranks launch the
    operations of all groups in one order (NCCL user guide, "Using multiple NCCL communicators concurrently"). Two
    threads would have no common order.

    Args:
        group: of all ranks, used by nobody else; None for a single rank.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group) if group is not None else 1
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._threaded = self._stream is None or (group is not None and dist.get_backend(group) == "gloo")
        self._work: queue.SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="local-sgd-exchange", daemon=True)
        if self._threaded:
            self._thread.start()

    def begin(
        self, place: tuple[int, ...], words: str, tensor: Tensor, average: Callable[[Tensor], Tensor]
    ) -> Callable[[], Tensor]:
        """Begin an exchange.

        Args:
            place: a few numbers that say where this rank is. They must be the same on all ranks.
            words: a format of the numbers for the error, such as `step {0} of epoch {1}`.
            tensor: of this rank. The caller must not change it afterwards, as the exchange reads and writes it.
            average: returns the average of the ranks' tensors, from this rank's. Called on the thread, or the stream.

        Returns:
            A function for `wait`. It waits for the average and returns it, or raises RanksApartError or the network's
            error.
        """
        ready = self._wait_for_queued(tensor)
        if not self._threaded:
            return self._queue_on_stream(place, words, ready, lambda: average(tensor))

        def work() -> Tensor:
            self._gather_places(place, words)()
            ready()
            return average(tensor)

        result: Future[Tensor] = Future()
        self._work.put((result, work))
        return result.result

    def wait(self, exchange: Callable[[], Tensor]) -> Tensor:
        """Return the average when it is there. On a GPU, work that this thread queues later waits for it instead."""
        averaged = exchange()
        if self._stream is not None:
            if self._threaded:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
            averaged.record_stream(torch.cuda.current_stream(self.device))
        return averaged

    def mean(self, tensor: Tensor) -> Tensor:
        """Average a tensor in place. For `average`."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
            tensor.div_(self.size)
        return tensor

    def first(self, tensor: Tensor) -> Tensor:
        """Give all ranks what the first has. For `average`."""
        if self.group is not None:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def close(self, wait_s: float) -> bool:
        """End the thread, if there is one, and return whether the group is unused, so that it can be destroyed.

        Args:
            wait_s: the longest wait for the exchange that is under way, in seconds.
        """
        if not self._threaded:
            return True
        self._work.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)
        with torch.no_grad():
            while (given := self._work.get()) is not None:
                result, work = given
                try:
                    result.set_result(work())
                except BaseException as error:  # the main thread raises it
                    result.set_exception(error)
                del given, result, work  # or the thread would keep the tensors until the next exchange

    def _queue_on_stream(
        self, place: tuple[int, ...], words: str, ready: Callable[[], None], average: Callable[[], Tensor]
    ) -> Callable[[], Tensor]:
        """Queue an exchange on the stream, where it waits for all work that the caller has queued before.

        If the caller waits for it at once, the operations of all groups run one after another on the GPU. Ranks at
        different steps are found when the average is asked for. By then NCCL has mixed their tensors, but the result is
        not used.
        """
        with torch.cuda.stream(self._stream), torch.no_grad():
            ready()
            compare = self._gather_places(place, words)
            averaged = average()
            done = torch.cuda.current_stream(self.device).record_event()

        def result() -> Tensor:
            compare()
            torch.cuda.current_stream(self.device).wait_event(done)
            return averaged

        return result

    def _wait_for_queued(self, tensor: Tensor) -> Callable[[], None]:
        """Return a function to call before an exchange reads a tensor: it waits for the caller's work on a GPU."""
        stream = self._stream
        if stream is None:
            return lambda: None
        queued = torch.cuda.current_stream(self.device).record_event()

        def ready() -> None:
            stream.wait_event(queued)
            # Its memory belongs to the main thread's stream. That could give it to another tensor once Python has freed
            # this one, while the exchange is still queued.
            if tensor.is_cuda:
                tensor.record_stream(stream)

        return ready

    def _gather_places(self, place: tuple[int, ...], words: str) -> Callable[[], None]:
        """Gather the steps of all ranks, and return a function that compares them.

        Ranks with unequal numbers of batches would average parameters of different steps, or one would wait for ever.
        The function waits only for the steps, not for work that is queued later. It may raise RanksApartError.
        """
        if self.group is None:
            return lambda: None
        # A kernel gets each number with its launch. A copy of the host's memory would wait for all that is queued.
        own = torch.stack([torch.full((), each, dtype=torch.int64, device=self.device) for each in place])
        gathered = own.new_empty(self.size, len(place))
        dist.all_gather(list(gathered), own, group=self.group)
        on_host, copied = gathered, None
        if gathered.is_cuda:
            on_host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            on_host.copy_(gathered, non_blocking=True)
            copied = torch.cuda.current_stream(gathered.device).record_event()

        def compare() -> None:
            if copied is not None:
                copied.synchronize()
            places = [tuple(each) for each in on_host.tolist()]
            if len(set(places)) > 1:
                listed = "; ".join(f"rank {rank}: {words.format(*each)}" for rank, each in enumerate(places))
                raise RanksApartError(
                    f"The ranks average their models, but they are at different places ({listed}). Each rank must take "
                    "equally many optimizer steps. Give all ranks the same number of batches in each epoch: "
                    "Trainer(use_distributed_sampler=True), or limit_train_batches=N for iterable data."
                )

        return compare


class Compression:
    """Sends a change in fewer bits, as `bf16` or `int8`, and adds the rounding errors to the next one: error feedback.

    The errors stay bounded, so that nothing is lost for good (Karimireddy et al. 2019,
    https://arxiv.org/abs/1901.09847).

    Attributes:
        residuals: the errors of this rank, flat: of the change and, under `int8`, of its share of the average.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.residuals: list[Tensor] = []

    def mean(self, tensor: Tensor, exchanges: Exchanges) -> Tensor:
        """Average a flat tensor over the ranks of the group; all of them get the same, bit for bit."""
        if exchanges.group is None:
            return tensor
        return self._mean_bf16(tensor, exchanges) if self.kind == "bf16" else self._mean_int8(tensor, exchanges)

    def _mean_bf16(self, tensor: Tensor, exchanges: Exchanges) -> Tensor:
        whole = tensor.add_(self._residual(0, tensor))
        sent = whole.bfloat16()
        torch.sub(whole, sent, out=self.residuals[0])
        dist.all_reduce(sent, group=exchanges.group)
        return sent.to(tensor.dtype).div_(exchanges.size)

    def _mean_int8(self, tensor: Tensor, exchanges: Exchanges) -> Tensor:
        """Each rank averages a share of the numbers and sends it to all: int8 cannot be summed on the way."""
        group, size = exchanges.group, exchanges.size
        whole = torch.nn.functional.pad(tensor, (0, -len(tensor) % (size * _BLOCK)))
        codes, scales = self._quantized(0, whole)
        their_codes, their_scales = torch.empty_like(codes), torch.empty_like(scales)
        dist.all_to_all_single(their_codes, codes, group=group)
        dist.all_to_all_single(their_scales, scales, group=group)
        share = _dequantized(their_codes, their_scales, tensor.dtype).view(size, -1).mean(0)
        share_codes, share_scales = self._quantized(1, share)
        dist.all_gather(list(codes.chunk(size)), share_codes, group=group)
        dist.all_gather(list(scales.chunk(size)), share_scales, group=group)
        return _dequantized(codes, scales, tensor.dtype)[: len(tensor)]

    def _quantized(self, stage: int, tensor: Tensor) -> tuple[Tensor, Tensor]:
        whole = tensor + self._residual(stage, tensor)
        blocks = whole.view(-1, _BLOCK)
        scales = blocks.abs().amax(1).div_(_INT8_MOST).float()
        # A block of zeros has no scale. A block with NaN or infinity becomes NaN, which the training shows.
        codes = (blocks / scales.where(scales != 0, 1).unsqueeze(1)).round_().to(torch.int8).view(-1)
        torch.sub(whole, _dequantized(codes, scales, tensor.dtype), out=self.residuals[stage])
        return codes, scales

    def _residual(self, stage: int, tensor: Tensor) -> Tensor:
        if len(self.residuals) == stage:
            self.residuals.append(torch.zeros_like(tensor))
        return self.residuals[stage]


def _dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.view(-1, _BLOCK).to(dtype) * scales.unsqueeze(1).to(dtype)).view(-1)
