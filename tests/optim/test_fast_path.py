"""The short ways of an eager pass, where they must not be taken: each was taken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from data_parallel import step_with_nan_in_one_shard
from processes import run_ranks
from torch import Tensor, nn
from twin import SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD, Site, VirtualGradientDescent, errors, virtual_grad, weights_only
from virtualgrad.operators import RMS
from virtualgrad.operators.base import nonfinite_indices
from virtualgrad.operators.rms_settings import RMSSettings

BATCH, STEPS = 8, 5


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Raw(nn.Module):
    """Raw parameters a, b, c, ..., and any forward."""

    def __init__(self, forward: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = forward
        for name, shape in zip("abcdef", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(*shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def train_beside_twin(model: nn.Module, x: Tensor, where: Callable[[Site], bool]) -> None:
    """Train long enough for layers to be remembered; what ``where`` leaves out is left plain."""
    twin = Twin(model)
    optimizer = SVGD(model, twin.optimizer.param_groups[0]["lr"], scale=SCALE, where=where)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        named = list(twin.model.named_parameters())
        loss = twin.model(x).square().mean()
        found = virtual_grad(loss, named, twin.rms, where=where, batch_size=len(x))
        for (_, parameter), gradient in zip(named, found, strict=True):
            parameter.grad = gradient
        twin.optimizer.step()
    assert_trained_alike(model, twin.model)


# ---------------------------------------------------------------- rows of the weight's gradient


def test_a_parameter_that_is_the_input_of_a_layer_gets_the_transformed_gradient() -> None:
    """T is one factor per feature of g: right for the rows of a weight, but an input has none."""
    features, size = 4, 3
    model = Raw(
        lambda m, x: F.linear(m.a.expand(BATCH, size), m.b).tanh() * x, (size,), (features, size)
    )
    x = torch.randn(BATCH, 1)
    sigma = F.linear(model.a.expand(BATCH, size), model.b).detach().requires_grad_()
    (g,) = torch.autograd.grad((sigma.tanh() * x).sum(), sigma)
    transformed = SCALE * g / (0.1 * BATCH * g.square().sum(0) + 1e-6).sqrt()
    with SVGD(model, 0.1, scale=SCALE):
        model(x).sum().backward()
    torch.testing.assert_close(model.a.grad, (transformed @ model.b).sum(0).detach())
    torch.testing.assert_close(model.b.grad, transformed.sum(0)[:, None] * model.a.detach())


class Limited(RMS):
    """T of SVGD, with a bound on every number of T(g)."""

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        return super().__call__(g, site).clamp(-0.01, 0.01)


class Doubled(RMS):
    """The same by the method to which RMS leaves it."""

    def transform(self, g: Tensor, site: Site, numbers: RMSSettings) -> Tensor:
        return 2 * super().transform(g, site, numbers)


class Delegating:
    """Stands for T of SVGD in everything but T itself."""

    def __init__(self) -> None:
        self.inner = RMS()

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        return 3 * self.inner(g, site)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)


OF_THEIR_OWN = {"called": Limited, "transform": Doubled, "delegating": Delegating}
SEVERAL_LAYERS = {
    "rows": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
    "positions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Linear(2, 2)
    ),
}


@pytest.mark.parametrize("layers", SEVERAL_LAYERS)
@pytest.mark.parametrize("kind", OF_THEIR_OWN)
def test_what_others_make_of_t_is_not_passed_over(kind: str, layers: str) -> None:
    model, x = SEVERAL_LAYERS[layers]().double(), torch.randn(BATCH, 3).double()
    named = list(model.named_parameters())
    operator = OF_THEIR_OWN[kind]
    expected = virtual_grad(model(x).square().mean(), named, operator(), batch_size=BATCH)
    with VirtualGradientDescent(model, 0.1, operator()):
        model(x).square().mean().backward()
    for (_, parameter), gradient in zip(named, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


NORMS_OF_A: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "batch norm": (lambda m: F.batch_norm(m.a, None, None, m.b, m.c, True), ((4,), (4,))),
    "running": (
        lambda m: F.batch_norm(m.a, torch.ones(4), torch.ones(4), m.b, m.c, True),
        ((4,), (4,)),
    ),
    "eval": (lambda m: F.batch_norm(m.a, torch.ones(4), torch.ones(4), m.b, m.c), ((4,), (4,))),
    "layer norm": (lambda m: F.layer_norm(m.a, (4,), m.b, m.c), ((4,), (4,))),
    "without bias": (lambda m: F.layer_norm(m.a, (4,), m.b), ((4,),)),
    "batch norm without bias": (
        lambda m: F.batch_norm(m.a, None, None, m.b, None, True),
        ((4,),),
    ),
    "quotient": (lambda m: m.b / m.a, ((4,),)),
    "convolution by itself": (
        lambda m: F.conv1d(m.a[:, :, None], m.a[:4, :, None], m.b)[..., 0],
        ((4,),),
    ),
}


@pytest.mark.parametrize("rows", [BATCH, BATCH - 1], ids=["as many", "fewer"])
@pytest.mark.parametrize("kind", NORMS_OF_A)
def test_an_op_on_parameters_alone_has_no_samples(kind: str, rows: int) -> None:
    """Though it may have as many rows: by the graph as by the ops, and by the formula."""
    op, shapes = NORMS_OF_A[kind]
    model = Raw(lambda m, x: op(m).mean(0) * x, (rows, 4), *shapes)
    with torch.no_grad():
        model.a.abs_().add_(1)
    x, named = torch.randn(BATCH, 4), list(model.named_parameters())
    sigma = op(model).detach().requires_grad_()
    (g,) = torch.autograd.grad((sigma.mean(0) * x).pow(3).mean(), sigma)
    transformed = SCALE * g / (0.1 * g.square() + 1e-6).sqrt()
    linear = [model.b] if len(named) == 2 else [model.b, model.c]
    expected = torch.autograd.grad(op(model), linear, transformed)
    of_graph = virtual_grad(model(x).pow(3).mean(), named, RMS(scale=SCALE), batch_size=BATCH)
    torch.testing.assert_close(of_graph[1:], expected)
    with SVGD(model, 0.1, scale=SCALE):
        model(x).pow(3).mean().backward()
    for (_, parameter), gradient in zip(named, of_graph, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


TWICE: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "addmm": (lambda m: torch.addmm(m.b, m.a[:1].expand(BATCH, 4), m.a), (4, 4), 4),
    "linear": (lambda m: F.linear(m.a[0].expand(BATCH, 4), m.a, m.b), (4, 4), 4),
    "conv1d": (lambda m: F.conv1d(m.a[:1].expand(BATCH, 2, 3), m.a, m.b)[..., 0], (4, 2, 3), 4),
}


@pytest.mark.parametrize("kind", TWICE)
def test_a_bias_where_one_parameter_is_used_twice_has_its_samples(kind: str) -> None:
    op, shape, features = TWICE[kind]
    model = Raw(lambda m, x: op(m) * x, shape, (features,))
    x, named = torch.randn(BATCH, features), list(model.named_parameters())
    sigma = op(model).detach().requires_grad_()
    (g,) = torch.autograd.grad((sigma * x).pow(3).mean(), sigma)
    transformed = SCALE * g / (0.1 * BATCH * g.square().sum(0) + 1e-6).sqrt()
    of_graph = virtual_grad(model(x).pow(3).mean(), named, RMS(scale=SCALE), batch_size=BATCH)
    torch.testing.assert_close(of_graph[1], transformed.sum(0))
    with SVGD(model, 0.1, scale=SCALE):
        model(x).pow(3).mean().backward()
    torch.testing.assert_close(model.b.grad, of_graph[1])


# ---------------------------------------------------------------- layers that are left out


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Raw(lambda m, x: torch.mul(input=m.a, other=x) @ m.b, (3,), (3, 4)), id="mul"),
        pytest.param(
            Raw(lambda m, x: torch.prelu(input=x, weight=m.a) @ m.b, (3,), (3, 4)), id="prelu"
        ),
    ],
)
def test_a_layer_left_out_may_have_all_arguments_by_name(model: nn.Module) -> None:
    train_beside_twin(model.double(), torch.randn(BATCH, 3), weights_only)


def test_one_use_of_a_weight_is_left_out_and_another_is_not() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        positions = F.embedding(torch.arange(4), model.a)  # no sample axis
        return (positions + F.embedding(x, model.a)).tanh()

    tokens = torch.randint(0, 5, (BATCH, 4))
    train_beside_twin(Raw(forward, (5, 3)), tokens, lambda site: site.has_sample_axis)


def test_a_weight_is_left_out_and_a_bias_that_comes_with_it_later_is_not() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, (3,), model.a) + F.layer_norm(x.exp(), (3,), model.a, model.b)

    model = Raw(forward, (3,), (3,))
    train_beside_twin(model, torch.randn(BATCH, 3), lambda site: site.roles == ("bias",))


# ---------------------------------------------------------------- names and devices


def test_the_name_of_a_layer_may_have_the_sign_that_numbers_its_uses() -> None:
    model = nn.ModuleDict({"C#": nn.Linear(3, 3)})
    optimizer = SVGD(nn.ModuleList([model]), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model["C#"](model["C#"](torch.randn(BATCH, 3))).sum().backward()
        optimizer.step()
    keys = {"0.C#:linear(weight)", "0.C#:linear(weight)#1"}
    assert set(optimizer.operator.state) == keys  # type: ignore[attr-defined]


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 1)])
def test_shapes_can_be_asked_of_a_model_without_memory(layer: nn.Module) -> None:
    model = layer.double().to("meta")
    with SVGD(model, 0.1):
        assert 4 in model(torch.empty(3, 3, 3, device="meta")).shape


# ---------------------------------------------------------------- NaN and infinities


@pytest.mark.slow
def test_processes_with_shards_refuse_a_nan_together() -> None:
    """Else some would step, and some would not."""
    assert run_ranks(2, step_with_nan_in_one_shard) == [(True, True)] * 2


def test_a_gradient_that_is_a_conjugate_view_is_looked_at() -> None:
    found = torch.tensor([complex(0, float("inf"))]).conj()
    assert nonfinite_indices([torch.ones(2).cdouble().conj(), found]) == [1]
    model = nn.Linear(3, 2, bias=False, dtype=torch.complex128)
    optimizer = SVGD(model, 0.1)
    model(torch.randn(BATCH, 3).cdouble()).abs().sum().backward()
    assert model.weight.grad is not None
    model.weight.grad = model.weight.grad.conj()
    optimizer.step()


def test_numbers_whose_squares_overflow_are_finite() -> None:
    large = torch.full((3,), 3e38, dtype=torch.float32)
    infinite = torch.tensor([1.0, -torch.inf], dtype=torch.bfloat16)
    assert nonfinite_indices([large, torch.empty(0), large.double() * 1e200]) == []
    assert nonfinite_indices([large, infinite, large]) == [1]


def test_a_look_at_tensors_of_all_kinds_changes_no_bit() -> None:
    nan = torch.tensor([torch.nan, -0.0, 1e-42])
    tensors = [
        torch.tensor([-0.0, 1e-42, 3e38]),
        nan,
        torch.randn(5).half(),
        torch.randn(5).bfloat16(),
        torch.ones(1).expand(4),  # may not be written to
        torch.full((1,), torch.inf).expand(4),
        torch.randn(3).double(),
        torch.tensor([1j]),
    ]
    before = [tensor.clone() for tensor in tensors]
    assert nonfinite_indices(tensors) == [1, 5]
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8))


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    most = torch.finfo(dtype).max
    finite = torch.full((4, 3), most, dtype=dtype)  # a sum of them is infinite
    empty = torch.empty(0, dtype=dtype)
    for number in (torch.nan, torch.inf, -torch.inf):
        found = finite.clone()
        found[2, 1] = number
        opposite = found.clone()
        opposite[0, 0] = -number
        tensors = [finite, empty, found, found.t(), found[:, 1], found[:, 0], opposite]
        assert nonfinite_indices(tensors) == [2, 3, 4, 6]
        assert nonfinite_indices([finite, -finite, empty, finite[:1].expand(4, 3)]) == []
        assert nonfinite_indices([finite, found[2:3].expand(4, 3)]) == [1]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_sparse_gradient_is_looked_at_by_its_values(number: float) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = VirtualGradientDescent(model, 0.1)
    before = model.weight.detach().clone()
    (model(torch.tensor([1, 3])) * torch.tensor([[1.0], [number]])).sum().backward()
    with pytest.raises(errors.NonFiniteError, match="weight"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_look_at_float32_does_not_depend_on_the_default_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default is float64 here, in which torch's look at all tensors together is refused."""
    monkeypatch.setattr(torch, "_foreach_norm", lambda *_, **__: 1 / 0)
    assert nonfinite_indices([torch.ones(2), torch.tensor([torch.nan])]) == [1]


# ---------------------------------------------------------------- factors of a commit


def test_a_commit_renews_the_factors_of_the_sites_that_were_reached() -> None:
    """Each by its own numbers; what was not reached has the r, and so the factor, of before."""
    model = nn.ModuleList(nn.Linear(3, 4, bias=False) for _ in range(3))
    groups = [{"params": [layer.weight], "scale": 1.0 + i} for i, layer in enumerate(model)]
    optimizer = SVGD.released(model, 0.1, params=groups)
    x = torch.randn(BATCH, 3)
    for step in range(4):
        optimizer.zero_grad()
        for layer in model if step % 2 else model[:2]:
            layer(x).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["eps"] *= 2  # seen by the next pass
        for kept in optimizer.operator.sites.kept.values():  # type: ignore[attr-defined]
            scale, eps = kept.factor_of
            assert torch.equal(kept.factor, (kept.r + eps).rsqrt() * scale)
    assert len(optimizer.operator.state) == 3  # type: ignore[attr-defined]


# ---------------------------------------------------------------- a constructor that fails


def test_an_optimizer_that_could_not_be_made_leaves_the_model_free() -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(errors.HyperparameterError, match="process_group"):
        SVGD(model, 0.1, process_group="wrong")
    assert type(model) is nn.Linear
    with SVGD(model, 0.1):  # its parameters are nobody's
        pass
