"""What compilers are told once, of modules and parameters: they are told anew where it changes.

Of a compiled model and a twin that runs eagerly the same is asked: the same gradients, whatever has
been done to both since the first compiled pass.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.errors import ModelError
from virtualgrad.virtual.parameters import TrackedParameters

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4)]
    return nn.Sequential(*layers).double()


def inputs(size: int = 6) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(size, 4).double()


class Twin:
    """A model, an optimizer, and how the model is called."""

    def __init__(self, *, compiled: bool, make: Callable[..., SVGD] = SVGD.released) -> None:
        self.model = network()
        self.make = make
        self.run: Any = self.model
        if compiled:
            self.run = torch.compile(self.model, backend="aot_eager", fullgraph=True)
        self.optimizer = make(self.model, 1e-2)

    def step(self) -> list[Tensor]:
        """The gradients of a step."""
        self.model.zero_grad()
        self.run(inputs()).pow(3).mean().backward()
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        if self.optimizer._attachment is not None and self.optimizer._attachment.active:
            self.optimizer.step()
        return found


def assert_as_eager(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


def layer() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(4, 4).double()


def add(twin: Twin) -> None:
    twin.model.append(layer())


def add_and_tell(twin: Twin) -> None:
    twin.model.append(layer())
    twin.optimizer.add_param_group({"params": twin.model[5].parameters(), "scale": 0.5})


def remove(twin: Twin) -> None:
    del twin.model[3]


def replace(twin: Twin) -> None:
    twin.model[3] = layer()


def replace_and_tell(twin: Twin) -> None:
    twin.model[3] = layer()
    twin.optimizer.add_param_group({"params": twin.model[3].parameters(), "scale": 0.5})


def replace_parameter(twin: Twin) -> None:
    twin.model[3].weight = nn.Parameter(layer().weight.detach())


def swap(twin: Twin) -> None:
    twin.model[0], twin.model[3] = twin.model[3], twin.model[0]


def set_forward(twin: Twin) -> None:
    twin.model[1].forward = lambda x: 2 * x  # type: ignore[method-assign]


def freeze(twin: Twin) -> None:
    twin.model[3].weight.requires_grad_(False)


def evaluate(twin: Twin) -> None:
    twin.model.eval()


def attach_again(twin: Twin) -> None:
    twin.optimizer.detach()
    twin.optimizer = twin.make(twin.model, 1e-2)


def attach_otherwise(twin: Twin) -> None:
    twin.optimizer.detach()
    twin.optimizer = SVGD(twin.model, 1e-2, scale=0.1)


def regroup(twin: Twin) -> None:
    """A new dict has some of the parameters, as a user may put one there."""
    (group,) = twin.optimizer.param_groups
    parts = []
    for part in (slice(0, 4), slice(4, None)):
        both = {name: group[name][part] for name in ("params", "param_names")}
        parts.append({**group, **both, "scale": 1.0 + len(parts)})
    twin.optimizer.param_groups[:] = parts


def regroup_in_step(twin: Twin) -> None:
    regroup(twin)
    twin.optimizer.zero_grad()


CHANGES = [
    *(add, add_and_tell, remove, replace, replace_and_tell, replace_parameter, swap, set_forward),
    *(freeze, evaluate, attach_again, attach_otherwise, regroup_in_step),
]


@pytest.mark.filterwarnings("ignore:.*come to Sequential since its optimizer")
@pytest.mark.parametrize("make", [SVGD, SVGD.released])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_compilation(change: Callable[[Twin], None], make: Any) -> None:
    eager, compiled = (Twin(compiled=each, make=make) for each in (False, True))
    assert_as_eager(compiled.step(), eager.step())
    for twin in (eager, compiled):
        change(twin)
    for _ in range(2):
        assert_as_eager(compiled.step(), eager.step())


@pytest.mark.filterwarnings("ignore:.*come to Sequential since its optimizer")
def test_the_id_of_what_is_gone_is_not_its_own() -> None:
    """Layers come and go, each likely to get the place of one before."""
    eager, compiled = (Twin(compiled=each) for each in (False, True))
    ids = set()
    for turn in range(6):
        for twin in (eager, compiled):
            if turn % 2:
                twin.model[3] = layer()
                twin.optimizer.add_param_group({"params": twin.model[3].parameters()})
            else:  # nobody's: its gradient is a plain one
                twin.model[3] = layer()
            gc.collect()
        ids.add(id(compiled.model[3].weight))
        assert_as_eager(compiled.step(), eager.step())


@pytest.mark.filterwarnings("ignore:.*come to Sequential since its optimizer")
def test_a_second_optimizer_is_refused_as_long_as_it_is_there() -> None:
    eager, compiled = (Twin(compiled=each) for each in (False, True))
    assert_as_eager(compiled.step(), eager.step())
    some = [{"params": [nn.Parameter(torch.zeros(2).double())]}]
    compiled.model.register_parameter("extra", some[0]["params"][0])
    second = SVGD(compiled.model, 1e-2, params=[compiled.model.extra])  # type: ignore[list-item]
    with pytest.raises((ModelError, torch._dynamo.exc.Unsupported), match="two optimizers"):
        compiled.step()
    second.detach()
    eager.model.register_parameter("extra", nn.Parameter(torch.zeros(2).double()))
    assert_as_eager(compiled.step(), eager.step())


def test_the_first_of_two_goes() -> None:
    """Its class stays below that of the second one, and does nothing."""
    twin = Twin(compiled=True)
    twin.model.register_parameter("extra", nn.Parameter(torch.zeros(4).double()))
    second = SVGD(twin.model, 1e-2, params=[twin.model.extra])  # type: ignore[list-item]
    with pytest.raises((ModelError, torch._dynamo.exc.Unsupported), match="two optimizers"):
        twin.step()
    twin.optimizer.detach()
    plain = copy.deepcopy(twin.model)
    twin.run(inputs()).pow(3).mean().backward()
    plain.zero_grad()
    plain(inputs()).pow(3).mean().backward()
    assert_as_eager(
        [p.grad for p in twin.model.parameters() if p.grad is not None],
        [p.grad for p in plain.parameters() if p.grad is not None],
    )
    second.detach()


def test_shards_that_come_later_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(compiled=True)
    twin.step()
    assert twin.optimizer._attachment is not None
    monkeypatch.setattr(TrackedParameters, "has_shards", lambda self: True)
    twin.optimizer._attachment.intercept.track({})
    with pytest.raises((ModelError, torch._dynamo.exc.Unsupported), match="FSDP2"):
        twin.step()


def test_detached_and_copied_models_are_plain() -> None:
    twin = Twin(compiled=True)
    twin.step()
    copied = copy.deepcopy(twin.model)
    plain = network()
    plain.load_state_dict(copied.state_dict())
    run = torch.compile(copied, backend="aot_eager", fullgraph=True)
    copied.zero_grad()
    run(inputs()).pow(3).mean().backward()
    plain(inputs()).pow(3).mean().backward()
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    assert_as_eager([p.grad for p in copied.parameters() if p.grad is not None], expected)
    twin.optimizer.detach()
    assert_as_eager(twin.step(), expected)


def test_passes_without_gradients_are_another_graph() -> None:
    eager, compiled = (Twin(compiled=each) for each in (False, True))
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(compiled.run(inputs()), eager.run(inputs()))
        assert_as_eager(compiled.step(), eager.step())


@pytest.mark.parametrize("dynamic", [True, False])
def test_nothing_is_compiled_anew_for_a_schedule(dynamic: bool) -> None:
    model = network()
    optimizer = SVGD(model, 1e-2)
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for turn in range(6):
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            optimizer.zero_grad()
            run(inputs()).pow(3).mean().backward()
            optimizer.step()
        schedule.step()
        optimizer.param_groups[0]["scale"] *= 0.9
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_no_edition_is_told_twice() -> None:
    editions = set()
    for _ in range(3):
        twin = Twin(compiled=False)
        assert twin.optimizer._attachment is not None
        intercept = twin.optimizer._attachment.intercept
        editions.add(intercept.edition)
        intercept.renew()
        editions.add(intercept.edition)
        twin.optimizer.detach()
        editions.add(intercept.edition)
    assert len(editions) == 9
