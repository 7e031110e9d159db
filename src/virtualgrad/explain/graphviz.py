"""From Graphviz's language to files and pictures, with its program ``dot``."""

from __future__ import annotations

import shutil
import subprocess
from html import escape
from pathlib import Path

from virtualgrad.errors import GraphvizError

TEXT_SUFFIXES = (".dot", ".gv")
RENDERED_SUFFIXES = (".svg", ".png", ".pdf")


def save(text: str, path: Path) -> Path:
    """Write a picture in the format that the path's suffix names; all of the file, or nothing."""
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        content = text.encode()
    elif suffix in RENDERED_SUFFIXES:
        content = render(text, suffix.removeprefix("."))
    else:
        raise GraphvizError.of(
            given=f"the path {str(path)!r} with suffix {path.suffix!r}",
            allowed=", ".join((*TEXT_SUFFIXES, *RENDERED_SUFFIXES)),
            todo="choose one of these suffixes",
        )
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render(text: str, form: str) -> bytes:
    """Let ``dot`` draw a picture."""
    program = shutil.which("dot")
    if program is None:
        raise GraphvizError.of(
            given=f"a picture as {form}, but no program 'dot' on PATH",
            allowed=f"{' and '.join(TEXT_SUFFIXES)} without Graphviz, other formats with it",
            todo="install Graphviz (apt install graphviz, brew install graphviz, or "
            "https://graphviz.org/download), or save as .dot",
        )
    done = subprocess.run(
        [program, f"-T{form}"], input=text.encode(), capture_output=True, check=False
    )
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        raise GraphvizError.of(
            given=f"{program} -T{form}, which failed with code {done.returncode}: {message}",
            allowed="a Graphviz that can draw this format",
            todo="save as .dot and look at it with another program",
        )
    return done.stdout


def svg_or_note(text: str) -> str:
    """The picture as HTML, or how to get it."""
    try:
        svg = render(text, "svg").decode()
    except GraphvizError as error:
        return f"<p><small>No picture: {escape(str(error))}</small></p>"
    return f'<div style="overflow: auto">{svg[max(svg.find("<svg"), 0) :]}</div>'
