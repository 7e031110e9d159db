"""Searching the settings of optimizers, each with as many trials as every other.

How data flows: `spaces` says what is searched and turns found settings into a recipe's; `objective`
trains with them. A `search` is one optimizer's, and `plan` makes those of a comparison. Trials live
in a database (`storage`, `studies`), where any number of `worker` processes on any number of
machines take them from. `pruning` says which trials are hopeless. `pool` starts the workers of one
machine and `display` shows them. From the finished trials, `sensitivity` estimates how much of the
range does well, `results` makes tables and sentences, `texts` and `plots` the rest, `page` a page
of it all, and `write` leaves it in a folder. `command` is the command line's `sweep`;
docs/sweeps.md tells how to use it.
"""

from virtualgrad.lab.sweep.command import sweep

__all__ = ["sweep"]
