"""Callbacks that average weights (EMA, SWA) in Hugging Face's Trainer and in PyTorch Lightning.

Their base classes are imported when a callback is made: neither package is needed otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.averaging import AveragedModel
from collage_neuron.runtime.wrappers import unwrapped
from collage_neuron.states.sharding import local

FILE = "collage_average.pt"
"""In a checkpoint of Hugging Face's Trainer: the `state_dict` of the average."""


def hugging_face_average(*, every: int = 1, start: int = 0, use_buffers: bool = True, **how: Any) -> Any:
    """A callback for `Trainer(..., callbacks=[hugging_face_average(decay=0.999)])`: an `AveragedModel` of its model.

    The averages, rounded to the model's dtype, are in the model while the Trainer evaluates, and from the end of the
    training on; the trained weights come back bit for bit in between. Each checkpoint has the averages in fp32
    (`collage_average.pt`), and a resumed run takes them from `checkpoint-N` in `output_dir`. With
    `load_best_model_at_end` the model ends with the averages of the best checkpoint. `callback.average` is the
    `AveragedModel`. Give it after callbacks that decide when to evaluate.

    Args:
        every: the number of optimizer steps from one update to the next.
        start: the number of optimizer steps before the first update; until then the model is evaluated as it is.
        use_buffers: average floating-point buffers too; otherwise they are copied in each update.
        how: `decay`, `avg_fn`, `multi_avg_fn` and `device`, as in `AveragedModel`; by default the mean of all updates.

    Raises:
        ImportError: transformers is not installed.
        ValueError: arguments that `AveragedModel` rejects; `every` below 1.
    """
    from transformers import TrainerCallback

    return type("AverageCallback", (_InTrainer, TrainerCallback), {})(every, start, {**how, "use_buffers": use_buffers})


def lightning_average(*, every: int = 1, start: int = 0, use_buffers: bool = True, **how: Any) -> Any:
    """A callback for `lightning.Trainer(callbacks=[lightning_average(decay=0.999)])`, an `AveragedModel` of its module.

    It does what Lightning's `WeightAveraging` and `EMAWeightAveraging` do, over exact values and in fp32. The averages,
    rounded to the module's dtype, are in the module during validation and from the end of the fit on; the trained
    weights come back bit for bit in between. In a checkpoint, as with Lightning's, `state_dict` has the averages, for
    `load_from_checkpoint`, `current_model_state` the trained weights, and `averaging_state` the averages in fp32; a
    resumed run has all of them. `callback.average` is the `AveragedModel`. Arguments are as in `hugging_face_average`.

    Raises:
        ImportError: lightning is not installed.
        ValueError: arguments that `AveragedModel` rejects; `every` below 1.
    """
    from lightning.pytorch.callbacks import Callback

    return type("AverageCallback", (_InLightning, Callback), {})(every, start, {**how, "use_buffers": use_buffers})


class _Averaging:
    """An average of a model, which takes the place of the trained weights for a while."""

    average: AveragedModel

    def __init__(self, every: int, start: int, how: dict[str, Any]) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; give the number of steps from one update to the next, from 1 on")
        scratch = torch.nn.Linear(1, 1)
        AveragedModel(scratch, torch.optim.SGD(scratch.parameters()), **how)  # checks the arguments before a run begins
        self.every, self.start, self.how = every, start, how
        self.model: torch.nn.Module | None = None
        self.trained: list[torch.Tensor] = []
        """While the averages are in the model: what it has been trained to."""
        self._saving: Any = None

    def begin(self, model: torch.nn.Module, optimizers: Sequence[Optimizer], taken: int = 0) -> None:
        """Starts an average of `model`, of which `taken` steps are not part."""
        self.trained = []
        self.model, self.taken = model, taken
        self.average = AveragedModel(model, optimizers, **self.how)

    def update(self, steps: int) -> None:
        """Updates the averages after the last of so many steps, if it is time."""
        if steps > max(self.taken, self.start) and steps % self.every == 0:
            assert self.model is not None
            self.average.update_parameters(self.model)
        self.taken = max(self.taken, steps)

    def has_average(self) -> bool:
        """Returns True once there was an update."""
        return self.model is not None and int(self.average.n_averaged) > 0

    @torch.no_grad()
    def swap_in(self) -> None:
        """Puts the averages into the model, unless they are there or there was no update yet."""
        if not self.trained and self.has_average():
            self.trained = [t.clone() for t in self._here()]
            for here, mine in zip(self._here(), self._of(self.average.module), strict=True):
                here.copy_(mine)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Puts the trained weights back, if the averages are in the model."""
        for here, trained in zip(self._here() if self.trained else (), self.trained, strict=True):
            here.copy_(trained)
        self.trained = []
        if self._saving is not None:
            self._saving.remove()
            self._saving = None

    def out_before_saving(self) -> None:
        """Makes `state_dict()` of the model swap the averages out."""
        if self.trained and self.model is not None and self._saving is None:
            self._saving = self.model.register_state_dict_pre_hook(lambda *_: self.swap_out())

    def trained_by_name(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The trained weights under the names of a saved state, if the averages are in the model."""
        assert self.model is not None
        named = chain(  # by all their names: what is tied has several
            self.model.named_parameters(remove_duplicate=False), self.model.named_buffers(remove_duplicate=False)
        )
        owners = map(id, chain(self.model.parameters(), self.model.buffers()))
        trained = dict(zip(owners, self.trained, strict=False))  # empty, if they are not
        return {name: trained[id(t)] for name, t in named if name in saved and id(t) in trained}

    def _here(self) -> list[torch.Tensor]:
        assert self.model is not None
        return self._of(self.model)

    def _of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        # By `data`, so that the optimizer takes the weights for unwritten: they come back with their low words.
        return [local(t.detach()).data for t in chain(model.parameters(), model.buffers())]


class _InTrainer(_Averaging):
    """Averages from the start of a training to its end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 0:
            self.swap_out()
        self.begin(given["model"], [unwrapped(given["optimizer"])])
        if state.global_step:
            self._load(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_step_begin(self, *given: Any, **more: Any) -> None:
        self.swap_out()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.update(state.global_step)
        self._before_evaluation(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._before_evaluation(control)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.is_world_process_zero:
            torch.save(self.average.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.swap_out()
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._load(Path(state.best_model_checkpoint))
        self.swap_in()

    def _before_evaluation(self, control: Any) -> None:
        # Until the next step begins, or the model is saved: nothing is called right before an evaluation.
        if control.should_evaluate:
            self.swap_in()
            self.out_before_saving()

    def _load(self, folder: Path) -> None:
        if (folder / FILE).exists():
            self.average.load_state_dict(torch.load(folder / FILE, map_location="cpu", weights_only=True))
        else:
            warnings.warn(f"there is no average in {folder / FILE}: it starts anew", stacklevel=2)


class _InLightning(_Averaging):
    """Averages from the start of a fit to its end."""

    loaded: Mapping[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":  # before weights are loaded and optimizers are made
            self.swap_out()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Steps of an earlier fit, or before a checkpoint, are not averaged again.
        self.begin(pl_module, [unwrapped(o) for o in trainer.optimizers], taken=trainer.global_step)
        if self.loaded is not None:
            self.average.load_state_dict(self.loaded)
            self.loaded = None

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        self.update(trainer.global_step)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self.swap_in()

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self.swap_out()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.swap_in()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.swap_out()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.has_average():
            now = checkpoint["state_dict"]
            checkpoint["current_model_state"] = now | self.trained_by_name(now)
            mine = self.average.module.state_dict()
            checkpoint["state_dict"] = {k: mine[k].to(v.dtype) if k in mine else v for k, v in now.items()}
            checkpoint["averaging_state"] = self.average.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return  # what is evaluated are the averages
        if "averaging_state" in checkpoint:
            self.loaded = checkpoint["averaging_state"]
            pl_module.load_state_dict(checkpoint["current_model_state"])
        else:
            warnings.warn("there is no average in this checkpoint: it starts anew", stacklevel=2)
