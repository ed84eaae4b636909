"""Where a training can be left and taken up again without a trace."""

from __future__ import annotations

from lightning.pytorch import Trainer


def at_step_boundary(trainer: Trainer) -> bool:
    """Whether a checkpoint at the end of this training batch has all there is, the same answer on all ranks.

    In the middle of accumulation it would lose gradients. Before a validation, and before the end of an epoch, it would
    lose these: Lightning, which does not save what is due, goes on with the next batch.

    Args:
        trainer: in `on_train_batch_end`.
    """
    loop = trainer.fit_loop.epoch_loop
    return not (accumulating(trainer) or loop._num_ready_batches_reached() or _validation_follows(trainer))


def accumulating(trainer: Trainer) -> bool:
    """Whether gradients wait for further batches, at the end of one."""
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is not None:  # counts on over the ends of epochs, where Lightning begins anew
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())
    return trainer.fit_loop._should_accumulate()


def _validation_follows(trainer: Trainer) -> bool:
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
