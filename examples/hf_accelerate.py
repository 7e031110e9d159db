"""Hugging Face's accelerate: make SVGD first, then ``prepare`` both, as with any optimizer."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from virtualgrad import SVGD


def network() -> nn.Sequential:
    """A small classifier."""
    return nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def batches() -> DataLoader:
    """Points in four classes, always in the same order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=generator)
    y = (x @ torch.randn(20, 4, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(x, y), batch_size=32)


def train(
    accelerator: Accelerator, model: nn.Module, epochs: int, max_norm: float = 1.0
) -> list[float]:
    """Train with clipping, and accumulation if the accelerator says so; return the losses."""
    optimizer = SVGD(model, lr=0.05, scale=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def main() -> None:
    """Train for some epochs, two batches to a step."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    losses = train(accelerator, network(), epochs=10)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
