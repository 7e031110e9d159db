"""Virtual gradients for PyTorch, and SVGD as a drop-in optimizer.

model -> sites -> T -> virtual gradient -> update -> evidence

A parameter theta enters the loss J through ops. The output sigma of an op that takes theta
directly is a site; backprop brings g = dJ/dsigma to it. The virtual gradient of theta is the
pull-back of T(g) instead of g, summed over its sites; activations still get the true g.

* ``sites``: which op outputs touch parameters, and is the op linear there;
* ``operators``: T;
* ``virtual``: from T(g) to the virtual gradient, in the paper's two encapsulations;
* ``optim``: virtual gradient descent, and SVGD;
* ``explain``: what was found in a model, as a table and a picture;
* ``checkpoints``: a training loop that can be killed at any moment;
* ``settings``: learning rate and scale from a working optimizer and a few batches;
* ``lab``: the evidence.
"""

from virtualgrad import operators
from virtualgrad.checkpoints import Checkpoint, Checkpoints
from virtualgrad.explain import Explanation, explain
from virtualgrad.optim import SVGD, VirtualGradientDescent
from virtualgrad.settings import RangeTest, Suggestion, range_test, suggest
from virtualgrad.sites import Site, every_linear_site, weights_only
from virtualgrad.virtual import virtual_grad

__version__ = "0.1.0"

__all__ = [
    "SVGD",
    "Checkpoint",
    "Checkpoints",
    "Explanation",
    "RangeTest",
    "Site",
    "Suggestion",
    "VirtualGradientDescent",
    "every_linear_site",
    "explain",
    "operators",
    "range_test",
    "suggest",
    "virtual_grad",
    "weights_only",
]
