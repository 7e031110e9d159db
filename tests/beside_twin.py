"""Training beside a twin: what happens to a model in the middle must show in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD, every_linear_site, virtual_grad

BATCH, STEPS, CHANGED_AT = 6, 6, 3

Change = Callable[[Any], object]


def train_beside_twin(
    model: nn.Module,
    change: Change = lambda model: None,
    where: Any = every_linear_site,
    *,
    at: int = CHANGED_AT,
) -> SVGD:
    """As the reference trains, which walks the graph.

    Both change when all layers are known; with ``at`` 0 before there is an optimizer.
    """
    twin, start = Twin(model), {n: p.clone() for n, p in model.state_dict().items()}
    if at == 0:
        change(model)
        change(twin.model)
        twin.optimizer = torch.optim.SGD(twin.model.parameters(), LR)
    optimizer = SVGD(model, LR, scale=SCALE, where=where)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if step == at > 0:
            change(model)
            change(twin.model)
        x = torch.randn(BATCH, 3, 5, generator=generator).double()
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        twin.optimizer.zero_grad()
        named = [(n, p) for n, p in twin.model.named_parameters() if p.requires_grad]
        expected = twin.model(x)
        torch.testing.assert_close(output, expected)
        found = virtual_grad(
            expected.square().mean(),
            named,
            twin.rms,
            where=where,
            batch_size=BATCH,
            allow_unused=True,
        )
        for (_, parameter), gradient in zip(named, found, strict=True):
            parameter.grad = gradient
        twin.optimizer.step()
    assert_trained_alike(model, twin.model)
    assert not torch.equal(model.linear.weight, start["linear.weight"])
    return optimizer
