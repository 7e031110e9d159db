"""Step 3 in C++, where it was built: nodes of autograd's graph that cost what torch's own cost.

model -> sites -> T -> **virtual gradient** -> update

In an eager pass each layer with a T is a node of Python (``torch.autograd.Function``), and where a
step is short, on a small network or a fast GPU, the host spends more time in them than torch's own
nodes take. Those of ``layers.cpp`` do the same, op by op, and to the same bits. They are built
once for each torch, by a C++ compiler, and used from then on:

    python -m virtualgrad.native

Without them, or behind ``virtualgrad.native.use(False)``, the nodes of Python run.
"""

from virtualgrad.native.build import build
from virtualgrad.native.load import layers, use

__all__ = ["build", "layers", "use"]
