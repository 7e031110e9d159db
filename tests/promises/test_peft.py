"""LoRA adapters of peft: only they move, nothing else is touched, and the step is the right one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from twin import LR, SCALE, Twin, assert_trained_alike
from zoo import ARCHITECTURES, BATCH, Architecture

from virtualgrad import SVGD, explain

TARGETS = {"GPT-2": ["c_attn", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"]}

Batch = tuple[dict[str, Tensor], Tensor]


def adapted(name: str, **options: Any) -> tuple[Architecture, nn.Module]:
    """A tiny model with adapters; both factors are random, so that both have a gradient."""
    architecture = ARCHITECTURES[name]
    config = LoraConfig(
        r=2, target_modules=TARGETS[name], fan_in_fan_out=name == "GPT-2", **options
    )
    model = get_peft_model(architecture.model(), config).double()
    torch.manual_seed(2)
    with torch.no_grad():
        for p_name, parameter in model.named_parameters():
            if "lora_B" in p_name:
                parameter.normal_(std=0.1)
    return architecture, model


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def frozen(model: nn.Module) -> dict[str, Tensor]:
    moving = adapters(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors if name not in moving}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("given", [False, True], ids=["without params", "with params"])
@pytest.mark.parametrize("name", TARGETS)
def test_only_the_adapters_move(name: str, given: bool, weight_decay: float) -> None:
    architecture, model = adapted(name)
    start, base, twin = copy.deepcopy(model), frozen(model), Twin(model)
    params = list(adapters(model).values()) if given else None
    optimizer = SVGD(model, LR, scale=SCALE, weight_decay=weight_decay, params=params)
    for step in range(4):
        batch: Batch = architecture.batch(seed=step)
        optimizer.zero_grad()
        architecture.loss(model, *batch).backward()
        optimizer.step()
        twin.backward(architecture.loss(twin.model, *batch), BATCH)
        with torch.no_grad():
            for parameter in adapters(twin.model).values():
                parameter.mul_(1 - LR * weight_decay)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model)
    for p_name, parameter in adapters(model).items():
        assert (parameter - start.get_parameter(p_name)).norm() > 1e-4, f"{p_name} has not moved"
    untouched = frozen(model)
    assert untouched.keys() == base.keys()
    assert all(torch.equal(untouched[key], base[key]) for key in base)
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)
    served = {key.partition(":")[0] for key in optimizer.operator.state}
    assert all("lora_" in path for path in served)  # no r for what is frozen


@pytest.mark.parametrize("name", TARGETS)
def test_explain_knows_which_are_frozen(name: str) -> None:
    architecture, model = adapted(name)
    found = explain(model, **architecture.batch()[0])
    assert set(found.uncovered) == {n for n, _ in model.named_parameters() if "lora_" not in n}
    assert all(reason.startswith("frozen") for reason in found.uncovered.values())
    assert found.rmsprop_elements == sum(p.numel() for p in adapters(model).values())


def test_adapters_that_are_merged_saved_and_loaded(tmp_path: Path) -> None:
    """What peft does to an attached model is what it does to a plain one."""
    architecture, model = adapted("Llama")
    optimizer = SVGD(model, LR, scale=SCALE)
    batch = architecture.batch()
    architecture.loss(model, *batch).backward()
    optimizer.step()
    trained = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    model.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(architecture.model(), tmp_path).double()
    expected = plain(**batch[0]).logits
    torch.testing.assert_close(model(**batch[0]).logits, expected, rtol=1e-10, atol=1e-12)
    loaded = get_peft_model_state_dict(plain)
    assert all(torch.equal(value, loaded[key]) for key, value in trained.items())
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**batch[0]).logits, expected, rtol=1e-9, atol=1e-11)
    assert not any("lora_" in name for name, _ in merged.named_parameters())


def test_training_goes_on_after_adapters_were_switched_off_for_a_reference() -> None:
    """As preference optimisation does: the frozen model is the one without adapters."""
    architecture, model = adapted("Llama")
    reference = copy.deepcopy(model)
    optimizers = [SVGD(model, LR), SVGD(reference, LR)]
    for step in range(3):
        batch = architecture.batch(seed=step)
        with model.disable_adapter(), torch.no_grad():
            model(**batch[0])
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            architecture.loss(m, *batch).backward()
            optimizer.step()
    for p_name, parameter in adapters(model).items():
        assert torch.equal(parameter, reference.get_parameter(p_name))


@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"lora_dropout": 0.5}, {"use_dora": True}]
)
def test_variants_move_adapters_only(options: dict[str, Any]) -> None:
    architecture, model = adapted("Llama", **options)
    base = frozen(model)
    optimizer = SVGD(model, LR)
    before = copy.deepcopy(model)
    for step in range(2):
        optimizer.zero_grad()
        architecture.loss(model, *architecture.batch(seed=step)).backward()
        optimizer.step()
    assert all(torch.equal(value, base[key]) for key, value in frozen(model).items())
    for p_name, parameter in adapters(model).items():
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, before.get_parameter(p_name)), p_name
