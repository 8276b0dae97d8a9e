"""Callbacks that put the monitor's numbers into the logs of Hugging Face's Trainer and of PyTorch Lightning.

Their base classes are imported when a callback is made: neither package is needed otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collage_neuron.monitoring.monitor import Monitor, monitor
from collage_neuron.monitoring.writers import Writer, points
from collage_neuron.runtime.wrappers import unwrapped


def hugging_face_monitor(*, every: int | None = None, to: Writer | Sequence[Writer] = (), modules: bool = False) -> Any:
    """A callback for `Trainer(..., callbacks=[hugging_face_monitor()])` that logs the monitor's numbers.

    With each log of the Trainer, the numbers of the last measured step join its entry in `state.log_history`, under the
    tags of `TensorBoard` (`collage/edq`, `collage/lost`, ...), and what callbacks after this one are given. The Trainer
    calls its trackers before the callbacks of users: give those to `to`, or put this callback first, with
    `trainer.callback_handler.callbacks.insert(0, ...)`.

    Args:
        every: the number of steps from one measured step to the next; the default is `logging_steps`.
        to: writers, as in `monitor`; of several processes, that of rank 0 has them.
        modules: whether to log two numbers for each module too.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class MonitorCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not read by the type checker
        measured: Monitor | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            optimizer = unwrapped(given["optimizer"])
            steps = every or max(1, int(args.logging_steps))  # a share of all steps, if it is below 1
            writers = to if state.is_world_process_zero else ()
            self.measured = monitor(optimizer, given.get("model"), every=steps, to=writers, taken=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
            record = self.measured.latest() if self.measured is not None else None
            if record is None or logs is None:
                return
            tagged = points(record, {}, modules)
            logs.update(tagged)
            if state.log_history:  # the Trainer has copied `logs` to it before it calls callbacks
                state.log_history[-1].update(tagged)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.measured is not None:
                self.measured.close()
                self.measured = None

    return MonitorCallback()


def lightning_monitor(*, every: int = 10, to: Writer | Sequence[Writer] = (), modules: bool = False) -> Any:
    """A callback for `lightning.Trainer(callbacks=[lightning_monitor()])` that logs the monitor's numbers.

    They are logged with `LightningModule.log_dict`, so they reach every logger and `trainer.callback_metrics`, under
    the tags of `TensorBoard` (`collage/edq`, ...). With several optimizers, those of the second are `collage/1/edq`,
    and so on, and `to` receives the first. Arguments are as in `hugging_face_monitor`.

    Raises:
        ImportError: lightning is not installed.
    """
    from lightning.pytorch.callbacks import Callback

    class MonitorCallback(Callback):  # type: ignore[misc]  # Lightning is not read by the type checker
        measured: Sequence[Monitor] = ()
        last_step: int = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            writers = to if trainer.is_global_zero else ()
            self.measured = [
                monitor(unwrapped(o), pl_module, every=every, to=writers if i == 0 else (), taken=trainer.global_step)
                for i, o in enumerate(trainer.optimizers)
            ]
            self.last_step = trainer.global_step

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            # With accumulated gradients several batches belong to one step.
            if trainer.global_step == self.last_step or trainer.global_step % every:
                return
            self.last_step = trainer.global_step
            for i, one in enumerate(self.measured):
                record = one.latest()
                if record is not None:
                    tagged = points(record, {}, modules)
                    pl_module.log_dict({tag.replace("/", f"/{i}/", 1) if i else tag: x for tag, x in tagged.items()})

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            for one in self.measured:
                one.close()
            self.measured = ()

    return MonitorCallback()
