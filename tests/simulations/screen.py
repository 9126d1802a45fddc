"""What several test modules share: reading what a run prints."""

import io

from rich.console import Console, RenderableType


def shown(renderable: RenderableType, width: int = 80) -> str:
    """Return what a terminal of this width would show, without colours."""
    file = io.StringIO()
    Console(width=width, file=file, color_system=None, legacy_windows=False).print(renderable)
    return file.getvalue()


def row(text: str, label: str) -> list[str]:
    """Return the words of the line that starts with this label, without the label."""
    lines = [line.strip().removeprefix("▸ ") for line in text.splitlines()]
    # The first line is the title, which begins with the algorithm's name.
    (line,) = [line for line in lines[1:] if line == label or line.startswith(f"{label} ")]
    return line[len(label) :].split()
