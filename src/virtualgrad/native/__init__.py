"""Step 3 in C++, where it was built: nodes of autograd's graph that cost what torch's own cost.

model -> sites -> T -> **virtual gradient** -> update

In an eager pass each layer with a T is a node of Python (``torch.autograd.Function``), and where a
step is short, on a small network or a fast GPU, the host spends more time in them than torch's own
nodes take. Those of ``layers.h`` and ``norms.h`` do the same, op by op, and to the same bits;
``transform.h`` makes T as Python has made it before, and ``launches.h`` launches kernels that
Triton has compiled, without Triton's Python. They are built once for each torch, by a C++ compiler,
and used from then on:

    python -m virtualgrad.native

Without them Python does the same; also layers and kernels that are run first behind
``virtualgrad.native.use(False)``.
"""

from virtualgrad.native.building import build
from virtualgrad.native.load import built, use

__all__ = ["build", "built", "use"]
