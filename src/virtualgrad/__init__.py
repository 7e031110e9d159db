"""Virtual gradients for PyTorch, and SVGD as a drop-in optimizer.

model -> sites -> T -> virtual gradient -> update -> evidence

A parameter theta enters the loss J through ops. The output sigma of an op that takes theta
directly is a site; backprop brings g = dJ/dsigma to it. The virtual gradient of theta is the
pull-back of T(g) instead of g, summed over its sites; activations still get the true g.

* ``sites``: which op outputs touch parameters, and is the op linear there;
* ``operators``: T;
* ``virtual``: from T(g) to the virtual gradient, in the paper's two encapsulations;
* ``native``: parts of it in C++, for steps that wait for the host, where they were built;
* ``optim``: virtual gradient descent, and SVGD;
* ``explain``: what was found in a model, as a table and a picture;
* ``checkpoints``: a training loop that can be killed at any moment;
* ``settings``: learning rate and scale from a working optimizer and a few batches;
* ``lab``: the evidence.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

# The names come with torch, so they are imported when the first of them is asked for: the command
# line, which lies below this package, tells its help without waiting for torch.
_PARTS = (
    "checkpoints",
    "errors",
    "explain",
    "native",
    "operators",
    "optim",
    "settings",
    "sites",
    "virtual",
)


if not TYPE_CHECKING:  # for a type checker a name that is not imported above is a mistake

    def __getattr__(name: str) -> object:
        """Import the library when the first of its names, or one of its parts, is asked for."""
        if name not in __all__ and name not in _PARTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for part in _PARTS:
            module = import_module(f"{__name__}.{part}")
            globals().update({key: getattr(module, key) for key in __all__ if hasattr(module, key)})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS, "__version__"})


class _Package(ModuleType):
    """Importing a folder sets it as an attribute: `explain` stays the function for all that."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "explain" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
