"""Real architectures of Hugging Face's ``transformers``, tiny and with random weights.

Used by ``examples/architectures.py``, which writes ``docs/architectures.md``, and by the tests.
"""

import transformers

from zoo.architecture import BATCH, Architecture
from zoo.senses import SPEECH, VISION
from zoo.text import TEXT

# Tiny configurations have unusual token numbers, of which transformers tells in its log.
transformers.logging.set_verbosity_error()

ARCHITECTURES: dict[str, Architecture] = TEXT | VISION | SPEECH
"""Name -> architecture."""

__all__ = ["ARCHITECTURES", "BATCH", "Architecture"]
