"""What `virtualgrad` on a shell starts; it may be installed without what the lab needs."""

from __future__ import annotations

import sys

from virtualgrad.errors import VirtualGradError


def main() -> int:
    """Run the command line, or say how to install what it needs.

    `pip install .` makes the command, too, but brings torch alone. Only packages of others are a
    matter of installing: a module of our own that is missing is a bug, and stays a traceback.
    """
    try:
        from virtualgrad.lab import cli  # noqa: PLC0415 - typer is one of the packages

        cli.main()
    except ModuleNotFoundError as error:
        package = (error.name or "virtualgrad").partition(".")[0]
        if package == "virtualgrad":
            raise
        sentence = VirtualGradError.of(
            given=f"the command virtualgrad without the package {package!r}",
            allowed="the command with what its experiments need; the library needs torch alone",
            todo='pip install ".[lab]" in the folder of the repository',
        )
        print(sentence, file=sys.stderr)
        return 1
    return 0
