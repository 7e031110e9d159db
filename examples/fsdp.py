"""Sharded training (FSDP2): torchrun --nproc-per-node 2 fsdp.py (python fsdp.py: one process).

Shard the model first, then make the optimizer: its parameters are the shards.
"""

import gc
import os

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from virtualgrad import SVGD

if "RANK" not in os.environ:  # not started by torchrun
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
kind = "cuda" if torch.cuda.is_available() else "cpu"
distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
mesh = init_device_mesh(kind, (ranks,))
device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)

torch.manual_seed(0)  # the same data and order in every process
x = torch.randn(512, 20, device=device)
y = (x @ torch.randn(20, 4, device=device)).argmax(1)
losses = []

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
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
