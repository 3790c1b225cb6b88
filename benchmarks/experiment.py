"""What experiments share: options of their rows, sizes by device, how they end."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.cli.options import Exit, together
from tilewise.cli.picture import png_option

from .bench.commands.options import row_options

output_options = together(row_options, png_option)


def sizes_on(device: str, gpu: dict, cpu: dict, asked: dict) -> dict:
    """The usual sizes of a GPU or of a CPU, but for what is asked."""
    usual = gpu if device.startswith("cuda") else cpu
    return {name: asked.pop(name) or value for name, value in usual.items()}


def progress(screen) -> Callable[[str], None]:
    """Tells what is done meanwhile."""
    return lambda line: screen.print(line, style="dim")


def fail_if(is_wrong: object) -> None:
    """Exit code 1 where a result of ours is wrong."""
    if is_wrong:
        raise SystemExit(Exit.FAILED)
