"""Options that several commands have, with one meaning and one help text each."""

from pathlib import Path
from typing import Annotated, Any

import typer

Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto.")]
Amp = Annotated[bool, typer.Option("--amp", help="bfloat16 autocast.")]
Compile = Annotated[
    bool, typer.Option("--compile", help="torch.compile the network: worth it on a GPU.")
]
AtOnce = Annotated[
    int | None,
    typer.Option("--at-once", min=1, help="Runs side by side; by default 5 on a GPU, 1 on a CPU."),
]
FirstSeed = Annotated[int, typer.Option("--first-seed", min=0, help="The first seed.")]
Stretched = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, help="Steps of a run; the recipe's schedule is stretched to fit."
    ),
]
Records = Annotated[Path, typer.Option("--out", help="Folder for the records.", file_okay=False)]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Leave out finished runs, and go on with unfinished ones."),
]
Markdown = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A Markdown file to put the tables into, where two comments mark the place.",
        dir_okay=False,
        exists=True,
    ),
]


def existing_folder(help_text: str) -> Any:
    """An option that names a folder of earlier results."""
    return typer.Option(metavar="DIR", help=help_text, file_okay=False, exists=True)
