"""How good are settings that were suggested? Train with them, beside tuned ones.

recipe -> ways to settings -> runs (the engine of `reproduce`) -> records -> table

``ways`` finds settings by each of the library's tools, ``files`` keeps what was found, ``compare``
trains with all of them, ``table`` lays out the errors, ``command`` is `virtualgrad suggest`.
"""

from virtualgrad.lab.settings.command import suggest

__all__ = ["suggest"]
