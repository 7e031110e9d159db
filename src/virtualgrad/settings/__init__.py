"""Settings from what one has: a working optimizer, and a few batches.

current optimizer + batches -> sizes of gradients, T(g)'s pull-backs and steps -> (lr, scale)

* ``batches``: a loss from a batch, a copy of the model to try things on, random numbers kept;
* ``current``: what a torch.optim optimizer does with a gradient;
* ``measure``: how large gradients, virtual gradients and steps are, parameter by parameter;
* ``trial``: train a copy on the batches;
* ``choose``: :func:`suggest`, by the paper's rules, checked by all of these;
* ``suggestion``: what it found, to read and to build SVGD from;
* ``ramp``: :func:`range_test`, the loss while the learning rate grows, for several scales;
* ``ranges``, ``plot``: what that found, as a table and a picture.

The user's model, its buffers and gradients, the optimizer and the random numbers stay as they are.
"""

from virtualgrad.settings.batches import SettingsError
from virtualgrad.settings.choose import suggest
from virtualgrad.settings.plot import MatplotlibMissingError
from virtualgrad.settings.ramp import range_test
from virtualgrad.settings.ranges import Best, RangeCurve, RangeTest
from virtualgrad.settings.suggestion import Suggestion, Trials

__all__ = [
    "Best",
    "MatplotlibMissingError",
    "RangeCurve",
    "RangeTest",
    "SettingsError",
    "Suggestion",
    "Trials",
    "range_test",
    "suggest",
]
