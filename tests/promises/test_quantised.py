"""A frozen base in int8 under adapters: only the adapters move, and not a bit of the base.

bitsandbytes and torchao keep quantised weights as parameters of an integer dtype, or of a float
dtype in name only, and compute with a Function of their own. The layers here do the same by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from twin import LR, SCALE, Twin, assert_trained_alike
from zoo import ARCHITECTURES, BATCH

from virtualgrad import SVGD, explain


class Int8Linear(nn.Linear):
    """Weights in int8 with a scale per row, as a parameter that needs no gradient."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        quantised = (layer.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(quantised, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class DequantisingProduct(torch.autograd.Function):
    """x W^T that keeps int8 for its backward, as bitsandbytes' MatMul8bitLt does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale).t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return g @ (weight.to(g.dtype) * scale), None, None


class Int8ByFunction(Int8Linear):
    """The same with a Function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return DequantisingProduct.apply(x, self.weight, self.scale.to(x.dtype))


class Packed4bit(Int8Linear):
    """Two numbers of four bits in a byte, in one column: no shape of a weight, as NF4 is kept."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        numbers = (self.weight.detach().float() / 127 * 7).round() + 8
        high, low = numbers.to(torch.uint8).flatten().view(-1, 2).unbind(1)
        self.weight = nn.Parameter((high * 16 + low).view(-1, 1), requires_grad=False)
        self.scale = self.scale * 127 / 7

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.cat([self.weight // 16, self.weight % 16], 1).to(x.dtype) - 8
        weight = numbers.view(self.out_features, self.in_features) * self.scale.to(x.dtype)
        return F.linear(x, weight)


class FloatInName(Tensor):
    """A weight that calls itself float64 and holds int8, as torchao's tensors do."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> FloatInName:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float64)
        made.numbers, made.scale = values, scale
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.numbers.to(x.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            (whole,) = args
            return FloatInName(function(whole.numbers), function(whole.scale))
        raise NotImplementedError(function)  # whoever computes with it in another way


class SubclassWeight(Int8Linear):
    """The same, in a weight of another class."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        weight = FloatInName(self.weight.detach(), self.scale.double())
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model as it is stored."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {n: getattr(t, "numbers", t).detach().clone() for n, t in tensors if t is not None}


def quantised_llama(layer_class: type[Int8Linear]) -> nn.Module:
    """A tiny Llama with int8 projections and LoRA on two of them."""
    model = ARCHITECTURES["Llama"].model()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, layer_class(child))
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.double()
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def train_both(model: nn.Module, optimizer: SVGD, twin: Twin, steps: int) -> None:
    """The same batches for a model and its twin."""
    architecture = ARCHITECTURES["Llama"]
    for step in range(steps):
        batch = architecture.batch(seed=step)
        optimizer.zero_grad()
        architecture.loss(model, *batch).backward()
        optimizer.step()
        twin.backward(architecture.loss(twin.model, *batch), BATCH)
        twin.optimizer.step()


@pytest.mark.parametrize("given", [False, True], ids=["without params", "with params"])
@pytest.mark.parametrize("layer_class", [Int8Linear, Int8ByFunction])
def test_only_the_adapters_move(layer_class: type[Int8Linear], given: bool) -> None:
    model = quantised_llama(layer_class)
    assert sum(p.dtype == torch.int8 for p in model.parameters()) == 14
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = Twin(model)
    params = [p for p in model.parameters() if p.requires_grad] if given else None
    optimizer = SVGD(model, LR, scale=SCALE, weight_decay=0.0, params=params)
    train_both(model, optimizer, twin, steps=4)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor) == ("lora_" not in name), name
    for name, parameter in model.named_parameters():
        expected = twin.model.get_parameter(name)
        if "lora_" in name:
            torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-13, msg=name)
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("layer_class", [Packed4bit, SubclassWeight])
def test_other_ways_to_store_a_base(layer_class: type[Int8Linear]) -> None:
    model = quantised_llama(layer_class)
    before, twin = stored(model), Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE)
    train_both(model, optimizer, twin, steps=3)
    for name, tensor in stored(model).items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            expected = twin.model.get_parameter(name)
            torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-13, msg=name)
    found = explain(quantised_llama(layer_class), **ARCHITECTURES["Llama"].batch()[0])
    assert all(reason.startswith("frozen") for reason in found.uncovered.values())


def test_adapters_on_int8_train_as_on_the_same_numbers_in_float() -> None:
    """The base dequantised beforehand, as plain layers."""
    architecture = ARCHITECTURES["Llama"]
    model, plain = quantised_llama(Int8Linear), quantised_llama(Int8Linear)
    for module in list(plain.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Int8Linear):
                layer = nn.Linear(child.in_features, child.out_features, bias=False).double()
                layer.weight = nn.Parameter(child.weight * child.scale, requires_grad=False)
                setattr(module, name, layer)
    assert not any(p.dtype == torch.int8 for p in plain.parameters())
    optimizers = [SVGD(m, LR, scale=SCALE) for m in (model, plain)]
    for step in range(4):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            architecture.loss(m, *architecture.batch(seed=step)).backward()
            optimizer.step()
    adapters, expected = (
        nn.ParameterDict({n.replace(".", "/"): p for n, p in m.named_parameters() if "lora_" in n})
        for m in (model, plain)
    )
    assert len(adapters) == 8
    assert_trained_alike(adapters, expected)


def test_state_is_saved_and_loaded_beside_int8() -> None:
    architecture = ARCHITECTURES["Llama"]
    model = quantised_llama(Int8ByFunction)
    optimizer = SVGD(model, LR)
    architecture.loss(model, *architecture.batch()).backward()
    optimizer.step()
    again = SVGD(quantised_llama(Int8ByFunction), LR)
    again.load_state_dict(optimizer.state_dict())
    assert again.operator.state.keys() == optimizer.operator.state.keys()
    assert len(again.operator.state) == 8


def test_explain_calls_int8_frozen() -> None:
    inputs, _ = ARCHITECTURES["Llama"].batch()
    model = quantised_llama(Int8Linear)
    found = explain(model, **inputs)
    assert set(found.uncovered) == {n for n, _ in model.named_parameters() if "lora_" not in n}
    assert all(reason.startswith("frozen") for reason in found.uncovered.values())
    assert all("lora_" in name for site in found.transformed for name in site.parameters)
