"""The callbacks that average weights, inside Hugging Face's Trainer and Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, example, snapshot
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Subset

import collage_neuron
from collage_neuron.trainers import FILE, hugging_face_average, lightning_average

pytestmark = pytest.mark.filterwarnings("default")  # other people's packages warn of one another

STEPS, DECAY = 6, 0.9


class Wide:
    """The average in float64 of the exact values after each step; and what is in the model when it is evaluated."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.evaluated: list[bool] = []

    def step(self, model: nn.Module, optimizer: Optimizer) -> None:
        now = [collage_neuron.exact_value(optimizer, p).double() for p in model.parameters()]
        if not self.values:
            self.values = now
        for value, x in zip(self.values, now, strict=True):
            value += (1 - DECAY) * (x - value)

    def evaluate(self, model: nn.Module, average: Any) -> None:
        """Notes whether the model has the averages, in its own dtype."""
        self.evaluated.append(has_averages(model, average))

    def check(self, average: Any) -> None:
        """Each update rounds twice, what it moves by and the sum: to 2**-24 of numbers that are not larger."""
        for a, wide in zip(average.module.parameters(), self.values, strict=True):
            assert a.dtype == torch.float32
            bound = STEPS * 2**-23 * wide.abs() + STEPS * 2**-30
            assert ((a.double() - wide).abs() <= bound).all()


def has_averages(model: nn.Module, average: Any) -> bool:
    mine = average.module.parameters()
    return all(torch.equal(p, a.to(p.dtype)) for p, a in zip(model.parameters(), mine, strict=True))


# --- Lightning --------------------------------------------------------------------------------------------------------

FORMS = ("configure_optimizers", "__init__")


def lightning_task(form: str) -> Any:
    module = example("lightning_module", "lightning")

    class Task(module.Task):  # type: ignore[misc,name-defined]  # Lightning is not read by the type checker
        """The example's, validated, and compiled in one of the places where it can be."""

        def __init__(self) -> None:
            super().__init__("model and optimizer", "split433")
            if form == "__init__":
                collage_neuron.compile(self.model)

        def configure_optimizers(self) -> Optimizer:
            made: Optimizer = (
                AdamW(self.parameters(), lr=3e-3) if form == "__init__" else super().configure_optimizers()
            )
            return made

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(**batch)

    torch.manual_seed(0)
    return Task()


def lightning_fit(task: Any, folder: Path, *callbacks: Any, steps: int = STEPS, start: Path | None = None) -> Any:
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=1, limit_val_batches=1,
        callbacks=[*callbacks], num_sanity_val_steps=1,
    )  # fmt: skip
    module = example("lightning_module", "lightning")
    data = Subset(module.Bytes(), range(8))  # one batch an epoch: a fit resumes between epochs
    trainer.fit(task, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8), ckpt_path=start)
    return trainer


def lightning_watch(wide: Wide, average: Any) -> Any:
    from lightning.pytorch.callbacks import Callback

    class Watch(Callback):  # type: ignore[misc]  # Lightning is not read by the type checker
        """Comes before the average, so that it sees a step first."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            wide.step(pl_module, trainer.optimizers[0])

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            if not trainer.sanity_checking:
                wide.evaluate(pl_module, average.average)

    return Watch()


def trained(optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and states, bit for bit."""
    return {k: v for k, v in snapshot(optimizer).items() if not (k.endswith(" grad") or k.startswith("group"))}


@pytest.mark.parametrize("form", FORMS)
def test_lightning_averages_exact_values_and_training_does_not_notice(form: str, tmp_path: Path) -> None:
    plain = lightning_fit(lightning_task(form), tmp_path)
    wide, average, task = Wide(), lightning_average(decay=DECAY), lightning_task(form)
    trainer = lightning_fit(task, tmp_path, lightning_watch(wide, average), average)
    wide.check(average.average)
    assert wide.evaluated == [True] * STEPS
    assert has_averages(task, average.average)  # from the end on
    average.swap_out()
    assert not has_averages(task, average.average)
    assert differences(trained(trainer.optimizers[0]), trained(plain.optimizers[0])) == []


def test_lightning_resumes_an_average_bit_for_bit(tmp_path: Path) -> None:
    form = FORMS[0]  # Lightning loads states before the first step, at which the other one compiles
    whole, first, second = (lightning_average(decay=DECAY) for _ in range(3))
    expected = lightning_fit(lightning_task(form), tmp_path, whole)
    half = lightning_fit(lightning_task(form), tmp_path, first, steps=STEPS // 2)
    half.save_checkpoint(tmp_path / "half.ckpt")  # after the end: the averages are in the module
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)
    for name, value in saved["state_dict"].items():
        assert torch.equal(value, first.average.module.state_dict()[name].to(value.dtype))
    assert any(not torch.equal(value, saved["state_dict"][k]) for k, value in saved["current_model_state"].items())
    found = lightning_fit(lightning_task(form), tmp_path, second, start=tmp_path / "half.ckpt")
    for callback in (whole, second):
        callback.swap_out()
    assert differences(trained(found.optimizers[0]), trained(expected.optimizers[0])) == []
    mine, other = second.average.state_dict(), whole.average.state_dict()
    assert all(torch.equal(mine[k], other[k]) for k in other)


def test_a_second_fit_of_lightning_starts_from_the_trained_weights(tmp_path: Path) -> None:
    average, task = lightning_average(decay=DECAY), lightning_task("configure_optimizers")
    lightning_fit(task, tmp_path, average, steps=2)
    average.swap_out()
    before = {k: v.clone() for k, v in task.state_dict().items()}
    average.swap_in()
    with pytest.raises(RuntimeError, match="stopped"):
        lightning_fit(task, tmp_path, average, stopping_at_validation(before), steps=4)
    assert not average.trained  # after an error too
    assert not has_averages(task, average.average)


def stopping_at_validation(before: dict[str, torch.Tensor]) -> Any:
    from lightning.pytorch.callbacks import Callback

    class Stop(Callback):  # type: ignore[misc]  # Lightning is not read by the type checker
        """Checks where the fit starts, and stops it in a validation."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert all(torch.equal(v, before[k]) for k, v in pl_module.state_dict().items())

        def on_validation_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step == 2 and not trainer.sanity_checking:
                raise RuntimeError("stopped")

    return Stop()


@pytest.mark.parametrize("form", FORMS)
def test_lightnings_own_average_is_told(form: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    with pytest.warns(collage_neuron.RoundedAverage, match="lightning_average"):
        lightning_fit(lightning_task(form), tmp_path, EMAWeightAveraging(), steps=20)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def hugging_face(form: str, folder: Path, **arguments: Any) -> Any:
    module = example("hf_trainer", "transformers")
    settings = module.Settings(form=form, steps=STEPS, strategy="split433", out=folder)
    trainer = module.make_trainer(settings)
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    data = module.Bytes()
    trainer.eval_dataset = {"one": Subset(data, range(8)), "two": Subset(data, range(8))}
    return trainer


def hugging_face_watch(wide: Wide, average: Any) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not read by the type checker
        """Sees exact values after a step, and weights in each batch of an evaluation."""

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            wide.step(given["model"], given["optimizer"].optimizer)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            wide.evaluate(given["model"], average.average)

    return Watch()


def evaluating() -> dict[str, Any]:
    from transformers.trainer_utils import IntervalStrategy

    return {"eval_strategy": IntervalStrategy.STEPS, "eval_steps": 1}


@pytest.mark.parametrize("form", ["optimizers", "model"])
def test_the_trainer_averages_exact_values_and_training_does_not_notice(form: str, tmp_path: Path) -> None:
    plain = hugging_face(form, tmp_path / "plain")
    plain.train()
    trainer = hugging_face(form, tmp_path / "averaged", **evaluating())
    wide, average = Wide(), hugging_face_average(decay=DECAY)
    trainer.add_callback(hugging_face_watch(wide, average))
    trainer.add_callback(average)
    trainer.train()
    wide.check(average.average)
    assert wide.evaluated == [True] * (2 * STEPS)  # two data sets in each evaluation
    assert has_averages(trainer.model, average.average)
    saved = type(trainer.model).from_pretrained(tmp_path / "averaged" / f"checkpoint-{STEPS}", dtype="auto")
    average.swap_out()
    assert differences(trained(trainer.optimizer.optimizer), trained(plain.optimizer.optimizer)) == []
    for p, q in zip(saved.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(p, q)  # what a run resumes from has been trained


def test_the_trainer_resumes_an_average_bit_for_bit(tmp_path: Path) -> None:
    whole, second = hugging_face_average(decay=DECAY), hugging_face_average(decay=DECAY)
    expected, found = (hugging_face("optimizers", tmp_path, **evaluating()) for _ in range(2))
    expected.add_callback(whole)
    expected.train()
    found.add_callback(second)
    found.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    for callback in (whole, second):
        callback.swap_out()
    assert differences(trained(found.optimizer.optimizer), trained(expected.optimizer.optimizer)) == []
    mine, other = second.average.state_dict(), whole.average.state_dict()
    assert all(torch.equal(mine[k], other[k]) for k in other)
    (tmp_path / f"checkpoint-{STEPS // 2}" / FILE).unlink()
    third = hugging_face("optimizers", tmp_path)
    third.add_callback(hugging_face_average())
    with pytest.warns(UserWarning, match=rf"there is no average in .*checkpoint-{STEPS // 2}.*: it starts anew"):
        third.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))


def test_the_best_checkpoint_brings_its_average(tmp_path: Path) -> None:
    from transformers.trainer_utils import SaveStrategy

    trainer = hugging_face(
        "optimizers", tmp_path, **evaluating(), load_best_model_at_end=True, metric_for_best_model="eval_one_loss",
        greater_is_better=True, save_steps=1, save_strategy=SaveStrategy.STEPS,
    )  # fmt: skip
    average = hugging_face_average(decay=DECAY)
    trainer.add_callback(average)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-1"
    saved = torch.load(best / FILE, weights_only=True)
    assert int(average.average.n_averaged) == 1
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, saved[f"module.{name}"].to(p.dtype))


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "needs"), [(lightning_average, "lightning"), (hugging_face_average, "transformers")])
def test_arguments_are_checked_when_a_callback_is_made(make: Any, needs: str) -> None:
    pytest.importorskip(needs)
    with pytest.raises(ValueError, match="decay is 2; give a number from 0 to 1"):
        make(decay=2)
    with pytest.raises(ValueError, match="each say how to average; give one of them"):
        make(decay=0.5, avg_fn=lambda average, value, n: average)
    with pytest.raises(ValueError, match="every is 0; give the number of steps"):
        make(every=0)
