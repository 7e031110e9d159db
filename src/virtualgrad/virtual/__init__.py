"""Step 3 of the flow: from T(g) to the virtual gradient, in the paper's two encapsulations.

model -> sites -> T -> **virtual gradient** -> update

1. Extend the ops: while the model runs, an op that takes a parameter runs with another pull-back,
   and ``backward()`` leaves virtual gradients in ``.grad``. The optimizer uses this one:

   * ``attach`` binds it to a model (``models``, ``inputs``; ``refusals`` where that cannot be
     right), ``intercept`` sees the ops;
   * ``parameters`` tells which parameter a tensor is, ``passes`` which pass this is (``tracking``
     holds what both remember), ``site_of_call`` what sigma is, ``plans`` which T acts there;
   * ``runs`` runs one of the ``calls``, with ``ops``, ``products``, ``convolutions`` and
     ``composites``; ``memories`` keeps the layers that run again as ``remembered``;
   * ``asked`` tells what a backward pass asks for.
2. Modify the topology (``topology``): read the recorded graph and call its nodes with T(g). It
   needs no change to the forward, and is the reference for the first.
"""

from virtualgrad.virtual.attach import Attachment, attachments_of
from virtualgrad.virtual.intercept import Intercept
from virtualgrad.virtual.models import named_parameters, unwrap
from virtualgrad.virtual.topology import virtual_grad

__all__ = [
    "Attachment",
    "Intercept",
    "attachments_of",
    "named_parameters",
    "unwrap",
    "virtual_grad",
]
