"""The paper's figures and what they claim, each as one command that measures it in seconds.

random matrices, networks or landscape -> numbers (frozen records) -> table and picture

* ``lemma``: :mod:`.matrices` draws M of given norm, :mod:`.isotropy` measures the lemma;
* ``theorem``: :mod:`.decrease` makes single steps with random Jacobians,
  :mod:`.decrease_networks` with real networks;
* ``paths``: :mod:`.valleys` follows theta and sigma, :mod:`.crossing` counts who arrives, and
  :mod:`.taylor` measures how well sigma = f(theta) holds.

The modules named ``*_plot`` only draw, :mod:`.tables` only prints, :mod:`.style` is the common
look, and :mod:`.commands` puts them together.
"""

from virtualgrad.lab.figures.commands import lemma, paths, theorem

__all__ = ["lemma", "paths", "theorem"]
