"""A module of your own with raw parameters: nothing to register, its ops are seen as they run."""

import torch
from torch import Tensor, nn

from virtualgrad import SVGD


class Attention(nn.Module):
    """Attention by einsum, with a weight per head, a learned position bias and a gate."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(heads, width, width // heads) / width**0.5)
        self.key = nn.Parameter(torch.randn(heads, width, width // heads) / width**0.5)
        self.value = nn.Parameter(torch.randn(heads, width, width // heads) / width**0.5)
        self.position = nn.Parameter(torch.zeros(heads, length, length))
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, length, width) -> the same."""
        q, k, v = (
            torch.einsum("ntc,hcd->nhtd", x, weight)
            for weight in (self.query, self.key, self.value)
        )
        attention = torch.softmax(q @ k.mT + self.position, dim=-1)
        mixed = (attention @ v).transpose(1, 2).flatten(2)
        return x + mixed * self.gate


torch.manual_seed(0)
model = nn.Sequential(Attention(16, 4, 6), nn.Flatten(), nn.Linear(96, 1))
optimizer = SVGD(model, lr=0.02, scale=0.3)
losses = []
for _ in range(150):
    x = torch.randn(64, 6, 16)
    target = x[:, 0] * x[:, 5]
    optimizer.zero_grad()
    loss = (model(x)[:, 0] - target.mean(1)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

for site in optimizer.operator.state:
    print(site)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
