"""Step 4 of the flow: from the virtual gradient to the new parameters.

model -> sites -> T -> virtual gradient -> **update**

``descent`` is virtual gradient descent with any operator T, ``svgd`` is the paper's Algorithm 1,
``update`` holds the update as plain functions, ``checks`` what a user may give. Beside them:

* ``attaching`` ties the optimizer to its model, ``groups`` names the parameters, ``occupied`` knows
  which operators are in use;
* ``scaling`` has T know the factor of the loss, ``nonfinite`` finds NaN before a step;
* ``mirror`` keeps T's numbers where compiled passes see them, ``processes`` finds the ranks that
  share a batch;
* ``saving`` puts the state of T into a state_dict, with the ``switches`` that it was made with,
  ``distributed_checkpoint`` makes room for it in sharded checkpoints.
"""

from virtualgrad.optim.descent import VirtualGradientDescent
from virtualgrad.optim.distributed_checkpoint import expect_state
from virtualgrad.optim.svgd import SVGD

__all__ = ["SVGD", "VirtualGradientDescent", "expect_state"]
