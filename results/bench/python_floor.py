"""What an eager step must cost where layers are Functions of Python, whatever SVGD adds.

    python results/bench/python_floor.py cuda > results/bench/profiles/python-floor-cuda.txt
    python results/bench/python_floor.py cpu > results/bench/profiles/python-floor-cpu.txt

VGG and ResNet-20 of the paper on a GPU, float32, channels-last, batch 128, or the MLP on two cores
of a CPU, batch 32; in turns:

* ``SGD``: torch.optim.SGD;
* ``Function``: the same, each convolution and linear layer by a Function that calls what torch's
  own calls;
* ``Function, T``: it also makes T(g), on a GPU by SVGD's kernel, kept from the first step, and
  pulls it back into the weight and g into the input. Nothing is looked up, checked, counted,
  committed or looked at for NaN;
* ``SVGD released``, with and without the look for NaN.

Printed are milliseconds a step, the ratio to SGD (medians of rounds of 10 steps), and the host's
time in forward, backward and step().
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.lab.networks import MLP, VGG, ResNet20
from virtualgrad.operators.kernels import Update, prepare

ROUNDS, STEPS, WARM_UP = 40, 10, 10
KNOWN = Update(rho=1.0, weight=0.0, scale=1.0, eps=1e-6)

Step = Callable[[], list[float]]


class Convolved(torch.autograd.Function):
    """A convolution as torch's own, or with T(g) for the weight."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the convolution."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return torch.conv2d(x, weight, bias, layer.stride, layer.padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        layer = ctx.layer
        sizes = None if layer.bias is None else list(layer.bias.shape)
        geometry = (layer.stride, layer.padding, (1, 1), False, (0, 0), 1)
        pull_back = torch.ops.aten.convolution_backward.default
        with_bias = sizes is not None
        if layer.transform is None:
            return None, *pull_back(g, x, weight, sizes, *geometry, [True, True, with_bias])
        product = layer.transform(g)
        _, of_weight, of_bias = pull_back(
            product, x, weight, sizes, *geometry, [False, True, with_bias]
        )
        of_x = pull_back(g, x, weight, sizes, *geometry, [True, False, False])[0]
        return None, of_x, of_weight, of_bias


class Multiplied(torch.autograd.Function):
    """A linear layer as torch's own, or with T(g) for the weight."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Run the product."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        sigma: Tensor = torch._C._nn.linear(x, weight, bias)
        return sigma

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        product = g if ctx.layer.transform is None else ctx.layer.transform(g)
        of_x = g @ weight if ctx.needs_input_grad[1] else None
        return None, of_x, product.t() @ x, g.sum(0)


class Transform:
    """T of one layer, with nothing around its kernel, or, on a CPU, its four ops."""

    def __init__(self) -> None:
        self.kernel: Any = None

    def __call__(self, g: Tensor) -> Tensor:
        """Return T(g)."""
        if g.is_cpu:
            if self.kernel is None:
                self.kernel = torch.ones_like(g[0])
            self.norm = g.square().sum(0).sqrt_()
            return g * self.kernel
        if self.kernel is None:
            self.r = torch.ones_like(g[0])
            self.kernel = prepare(g, self.r, (0,), known=True)
        product: Tensor
        product, self.norm = self.kernel(g, self.r, None, KNOWN)
        return product


class Convolution(nn.Conv2d):
    """A layer that runs the Function."""

    transform: Transform | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Run the convolution."""
        sigma: Tensor = Convolved.apply(self, x, self.weight, self.bias)
        return sigma


class Product(nn.Linear):
    """A layer that runs the Function."""

    transform: Transform | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Run the product."""
        sigma: Tensor = Multiplied.apply(self, x, self.weight, self.bias)
        return sigma


FUNCTIONS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: Convolution, nn.Linear: Product}


def by_functions(model: nn.Module, *, transformed: bool) -> torch.optim.Optimizer:
    """Let a model's layers be Functions, and descend with SGD."""
    for layer in model.modules():
        if type(layer) in FUNCTIONS:
            layer.__class__ = FUNCTIONS[type(layer)]  # type: ignore[assignment]
            if transformed:
                layer.transform = Transform()  # type: ignore[assignment]
    return torch.optim.SGD(model.parameters(), 1e-6)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 1e-6),
    "Function": lambda model: by_functions(model, transformed=False),
    "Function, T": lambda model: by_functions(model, transformed=True),
    "SVGD released": lambda model: SVGD.released(model, 1e-6),
    "SVGD released, NaN ignored": lambda model: SVGD.released(model, 1e-6, nonfinite="ignore"),
}


def trainer(network: type[nn.Module], optimizer_of: Callable[..., torch.optim.Optimizer]) -> Step:
    """A function that makes one step; it returns the seconds of forward, backward and step()."""
    torch.manual_seed(0)
    if network is MLP:
        model: nn.Module = network()
        x, y = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    else:
        model = network().cuda().to(memory_format=torch.channels_last)
        x = torch.randn(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randint(10, (128,), device="cuda")
    optimizer = optimizer_of(model)

    def step() -> list[float]:
        times = [time.perf_counter()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(times)]

    for _ in range(WARM_UP):
        step()
    return step


def wait() -> None:
    """Let a GPU do all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(network: type[nn.Module]) -> None:
    """Print a line for each way to train a network."""
    steps = {name: trainer(network, optimizer) for name, optimizer in OPTIMIZERS.items()}
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    parts: dict[str, list[list[float]]] = {name: [] for name in steps}
    for number in range(ROUNDS):
        for name in list(steps) if number % 2 == 0 else list(steps)[::-1]:
            wait()
            begin = time.perf_counter()
            parts[name] += [steps[name]() for _ in range(STEPS)]
            wait()
            rounds[name].append((time.perf_counter() - begin) / STEPS)
    for name, seconds in rounds.items():
        ratios = [own / sgd for own, sgd in zip(seconds, rounds["SGD"], strict=True)]
        host = [1e3 * statistics.median(part) for part in zip(*parts[name], strict=True)]
        print(
            f"{network.__name__}, {name}: {1e3 * statistics.median(seconds):.2f} ms, "
            f"{statistics.median(ratios):.2f} x SGD; host: forward {host[0]:.2f}, "
            f"backward {host[1]:.2f}, step() {host[2]:.2f}"
        )


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    on_cpu = sys.argv[1:] == ["cpu"]
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, {'CPU' if on_cpu else torch.cuda.get_device_name()}")
    for each in (MLP,) if on_cpu else (VGG, ResNet20):
        measure(each)
