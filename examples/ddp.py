"""Data parallel training: torchrun --nproc-per-node 2 ddp.py (python ddp.py runs one process).

r is that of the whole batch: two processes train as one with twice the batch would.
"""

import gc
import os

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from virtualgrad import SVGD

if "RANK" not in os.environ:  # not started by torchrun
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

torch.manual_seed(0)  # the same data and order in every process
x = torch.randn(512, 20, device=device)
y = (x @ torch.randn(20, 4, device=device)).argmax(1)
losses = []

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
model = DistributedDataParallel(model)
optimizer = SVGD.released(model, lr=0.1, scale=0.01)
for _ in range(10):
    for batch in torch.randperm(len(x)).split(64):
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

if rank == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
# A thread of torch's that still holds a tensor aborts an interpreter that ends, whatever the
# optimizer (https://github.com/pytorch/pytorch/issues/190489). Once nothing else holds the process
# groups, destroying them waits for their threads.
del model, optimizer, loss
gc.collect()
distributed.destroy_process_group()
