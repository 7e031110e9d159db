"""An operator T of your own: a function of g and of the site that it came to."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import Site, VirtualGradientDescent, operators

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x @ torch.randn(20, 4)).argmax(1)


def by_largest_sample(g: Tensor, site: Site) -> Tensor:
    """T(g) = g with every sample's part scaled so that its largest element is 1."""
    axis = site.layout.sample_axis
    if axis is None:  # a value of the whole batch, such as a position embedding
        return g / g.abs().max().clamp_min(1e-12)
    others = [a for a in range(g.dim()) if a != axis]
    return g / (g.abs().amax(others, keepdim=True).clamp_min(1e-12) * g.shape[axis])


# Operators compose: the rightmost acts first.
operator = operators.compose(operators.Clip(0.01), by_largest_sample)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = VirtualGradientDescent(model, lr=0.5, operator=operator)
losses = []
for _ in range(10):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
