"""The command line: names and summaries; a command is imported when it is called.

Nearly all of them need torch, which takes seconds to import, and `virtualgrad --help` needs none.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

app = typer.Typer(
    help="Virtual gradients and SVGD (arXiv 1907.04021): check the paper's claims yourself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS = {
    "report": "Make tables, plots and one page from the records of runs, beside the paper's "
    "numbers.",
    "data": "Fetch MNIST or CIFAR-10 and check every file against its published sum.",
    "lemma": "Check the lemma: E[ v'M'M u, given ||M|| = lambda ] is proportional to v.u.",
    "theorem": "Check the theorem: on average, a small virtual-gradient step lowers the loss.",
    "paths": "Draw the first figure: theta and sigma on a loss with many local valleys.",
    "bench": "Measure time and memory of a training step, SVGD beside torch's own optimizers.",
    "sweep": "Search learning rate (and, for SVGD, scale) of optimizers, each with as many trials.",
    "suggest": "Find settings of SVGD from a recipe's SGD, RMSProp and Adam, and train with them.",
    "reproduce": "Train the paper's networks by its recipes, and compare with its tables.",
}
"""Name -> the first sentence of the command's help; a test holds it equal."""

HOMES = {
    "data": "data.command",
    "lemma": "figures",
    "theorem": "figures",
    "paths": "figures",
    "suggest": "settings",
    "reproduce": "reproduce_command",
}
"""Name -> where the command is in the lab, if not in the package of its name."""


def command_named(name: str) -> TyperCommand:
    """Import a command."""
    alone = typer.Typer(add_completion=False)
    alone.command(name)(getattr(import_module(f"virtualgrad.lab.{HOMES.get(name, name)}"), name))
    command = typer.main.get_command(alone)
    assert isinstance(command, TyperCommand)  # a group only where there are several
    return command


class Late(TyperCommand):
    """A name and a summary; from its first argument on, the command itself takes over."""

    def make_context(self, info_name: str | None, *args: Any, **kwargs: Any) -> Any:
        """Begin a call, with the arguments on the command line."""
        assert self.name is not None
        return command_named(self.name).make_context(info_name, *args, **kwargs)


for command, summary in COMMANDS.items():
    app.command(command, help=summary, cls=Late)(lambda: None)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":  # pragma: no cover - `python -m virtualgrad.lab.cli`
    main()
