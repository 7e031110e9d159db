"""Hugging Face's Trainer trains as a loop written by hand, by a pair or by a subclass.

The model, the data and the subclass are those of ``examples/hf_trainer.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_trainer import SVGDTrainer, counting, tiny_gpt2
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer, TrainingArguments, get_scheduler

from virtualgrad import SVGD

STEPS, BATCH, LR, SCALE = 6, 8, 0.05, 0.1
DATA = counting(STEPS * BATCH)


def model() -> nn.Module:
    torch.manual_seed(0)
    return tiny_gpt2()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "lr_scheduler_type": "constant",
        "learning_rate": LR,
        "max_grad_norm": 0.0,  # off: clipping to a norm would hide a wrong scale
        "train_sampling_strategy": "sequential",  # as the loop below takes them
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **(usual | options))


def batches() -> list[Tensor]:
    return list(torch.stack([row["input_ids"] for row in DATA]).split(BATCH))


def by_hand(
    *,
    accumulate: int = 1,
    schedule: str = "constant",
    max_norm: float = torch.inf,
    autocast: bool = False,
) -> nn.Module:
    """The same training without the Trainer."""
    trained = model()
    optimizer = SVGD(trained, LR, scale=SCALE)
    steps = STEPS // accumulate
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=steps)
    for number, ids in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = trained(input_ids=ids).logits[:, :-1].float()
        # The Trainer divides by the number of labels of all micro-batches, the first ones, which
        # nothing predicts, included.
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        (loss / (accumulate * ids.numel())).backward()
        if (number + 1) % accumulate == 0:
            clip_grad_norm_(trained.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    optimizer.detach()
    return trained


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    start = model()
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(
            parameter, expected.get_parameter(name), rtol=1e-6, atol=1e-6, msg=name
        )
        moved = (parameter - start.get_parameter(name)).abs().max()
        assert moved > 1e-4, f"{name} has not moved"


@pytest.mark.parametrize(
    ("options", "hand"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 2, "max_steps": STEPS // 2}, {"accumulate": 2}),
        ({"lr_scheduler_type": "cosine"}, {"schedule": "cosine"}),
        ({"max_grad_norm": 1.0}, {"max_norm": 1.0}),
        ({"gradient_checkpointing": True}, {}),
    ],
    ids=["plain", "accumulation", "schedule", "clipping", "checkpointing"],
)
def test_a_pair_of_optimizer_and_no_scheduler(
    options: dict[str, Any], hand: dict[str, Any], tmp_path: Path
) -> None:
    trained = model()
    pair = (SVGD(trained, LR, scale=SCALE), None)
    Trainer(trained, arguments(tmp_path, **options), train_dataset=DATA, optimizers=pair).train()
    expected = by_hand(**hand)
    assert_same(trained, expected)
    if hand:  # the option does something
        weight = "transformer.wte.weight"
        assert not torch.allclose(by_hand().get_parameter(weight), expected.get_parameter(weight))


def test_a_pair_with_a_scheduler(tmp_path: Path) -> None:
    trained = model()
    optimizer = SVGD(trained, LR, scale=SCALE)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    pair = (optimizer, scheduler)
    Trainer(trained, arguments(tmp_path), train_dataset=DATA, optimizers=pair).train()
    assert_same(trained, by_hand(schedule="linear"))


@pytest.mark.usefixtures("without_onednn")
def test_bfloat16(tmp_path: Path) -> None:
    trained = model()
    pair = (SVGD(trained, LR, scale=SCALE), None)
    Trainer(trained, arguments(tmp_path, bf16=True), train_dataset=DATA, optimizers=pair).train()
    assert_same(trained, by_hand(autocast=True))


def test_the_subclass_for_models_that_the_trainer_makes(tmp_path: Path) -> None:
    trainer = SVGDTrainer(args=arguments(tmp_path), train_dataset=DATA, model_init=model)
    trainer.train()
    assert_same(trainer.model, by_hand())


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """The Trainer saves the optimizer's state, r with it, and loads it before the first forward."""
    saving = arguments(tmp_path, save_strategy="steps", save_steps=3)
    first = SVGDTrainer(model(), saving, train_dataset=DATA)
    first.train()
    resumed = SVGDTrainer(model(), arguments(tmp_path), train_dataset=DATA)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == STEPS
    assert_same(resumed.model, by_hand())
    assert_same(first.model, by_hand())  # saving on the way changes nothing
    state = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert any("@" in entry for entries in state["state"].values() for entry in entries)


def test_what_is_saved_is_a_plain_model(tmp_path: Path) -> None:
    trained = model()
    trainer = SVGDTrainer(trained, arguments(tmp_path), train_dataset=DATA)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(model()).from_pretrained(tmp_path / "saved")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name))
