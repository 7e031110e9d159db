"""Training that outlasts failures: torchrun --nproc-per-node 2 --max-restarts 3 elastic.py

``--fail 1:30`` kills rank 1 in the middle of step 30, ``--fail 1:30 0:45`` also rank 0 after that.
torchrun starts all processes anew, they go on from the last whole checkpoint, and the end is that
of a run without failures.
"""

import argparse
import gc
import os
import shutil
import signal

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from virtualgrad import SVGD, Checkpoints

STEPS, BATCH, BETWEEN_CHECKPOINTS = 60, 64, 10

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", help="keeps the checkpoints; if left out, they go in the end")
parser.add_argument("--fail", nargs="*", default=[], metavar="RANK:STEP", help="once per attempt")
arguments = parser.parse_args()

if "RANK" not in os.environ:  # not started by torchrun
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
# torchrun may keep its store over restarts, with the addresses of processes that are dead by now
# (https://github.com/pytorch/pytorch/issues/135712): every attempt needs names of its own there.
has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = distributed.TCPStore(*address, is_master=rank == 0 and not has_store)
distributed.init_process_group(
    "nccl" if torch.cuda.is_available() else "gloo",
    store=distributed.PrefixStore(f"attempt {attempt}", store),
    rank=rank,
    world_size=ranks,
)
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
failure = arguments.fail[attempt] if attempt < len(arguments.fail) else None

torch.manual_seed(0)  # the same data in every process
x = torch.randn(512, 20, device=device)
y = (x @ torch.randn(20, 4, device=device)).argmax(1)
first, losses = 0, []

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = SVGD.released(model, lr=0.1, scale=0.01, momentum=0.5)
checkpoints = Checkpoints(arguments.folder or "elastic-checkpoints")
latest = checkpoints.load()  # the same one in every process
if latest is not None:
    first, losses = latest.step, latest.state["losses"]
    model.load_state_dict(latest.state["model"])
    optimizer.load_state_dict(latest.state["optimizer"])
    print(f"attempt {attempt}: rank {rank} goes on at step {first}", flush=True)
replica = DistributedDataParallel(model)
for step in range(first, STEPS):
    epoch, place = divmod(step, len(x) // BATCH)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    mine = order[place * BATCH : (place + 1) * BATCH][rank::ranks]
    optimizer.zero_grad()
    loss = F.cross_entropy(replica(x[mine]), y[mine])
    loss.backward()
    if failure == f"{rank}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    losses.append(loss.item())
    if (step + 1) % BETWEEN_CHECKPOINTS == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.save(step + 1, state | {"losses": losses})  # rank 0 writes

if rank == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if arguments.folder is None:
        shutil.rmtree(checkpoints.folder)
# A thread of torch's that still holds a tensor aborts an interpreter that ends, whatever the
# optimizer (https://github.com/pytorch/pytorch/issues/190489). Once nothing else holds the process
# groups, destroying them waits for their threads.
del model, replica, optimizer, loss
gc.collect()
distributed.destroy_process_group()
