"""The loop you have, with one changed line."""

import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x @ torch.randn(20, 4)).argmax(1)
losses = []

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = SVGD(model, lr=0.1, scale=0.1)
for _ in range(10):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
