"""bfloat16 autocast with gradient accumulation: four micro-batches make a step.

r is gathered over the micro-batches, as of one large batch, whatever the factor of their losses.
With ``stale=True`` T divides by the r of the last step, so that T is that of the large batch, too.
"""

import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD

MICRO_BATCHES = 4

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
images = torch.randn(256, 3, 16, 16, device=device)
labels = images.mean((2, 3)).argmax(1)  # which channel is the brightest
losses = []

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(256, 3),
).to(device)
# The first step divides by sqrt(eps), as r is still zero: eps is chosen for that.
optimizer = SVGD(model, lr=0.05, scale=0.3, eps=1e-2, stale=True, momentum=0.9)
for _ in range(15):
    for batch in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in batch.split(len(batch) // MICRO_BATCHES):
            with torch.autocast(device, torch.bfloat16):  # no GradScaler: bfloat16 needs none
                output = model(images[micro_batch])
            loss = F.cross_entropy(output.float(), labels[micro_batch]) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
