"""`tilewise info`: what is usable here, and for each thing that is not, why and what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from . import machine as facts
from .tables import NO, OK, console, table

if TYPE_CHECKING:
    import torch

    from ..problem import Problem

# Integrations that are registered by a call: package -> what then names tilewise.
REGISTERED = {
    "transformers": "attn_implementation='tilewise'",
    "diffusers": "model.set_attention_backend('tilewise')",
}
FEATURES_FOR = "features for {} tensors"  # the name of a section


class Line(NamedTuple):
    """One fact: `mark` is "ok" or "no", or empty where nothing is judged. Of a feature, `value`
    names the backends that serve it, `remedy` those that do not, and why.
    """

    section: str
    name: str
    mark: str
    value: str
    remedy: str = ""


@click.command(short_help="Show what works on this machine; for the rest, why not and what to do.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table to paste into an issue.")
def info(as_json: bool, markdown: bool) -> None:
    """Show what works on this machine; for the rest, why not and what to do."""
    lines = [*machine(), *backends(), *features(), *caches(), *integrations()]
    if as_json:
        click.echo(json.dumps([line._asdict() for line in lines], indent=1))
    elif markdown:
        click.echo(as_markdown(lines))
    else:
        screen = console()
        for section in dict.fromkeys(line.section for line in lines):
            rows = [line[1:] for line in lines if line.section == section]
            heads = ["served by", "not by"] if section.startswith("features") else ["", "remedy"]
            screen.print(table([section, "", *heads], rows))
        screen.print(summary(lines))


def machine() -> list[Line]:
    """Versions, the GPU, and what Triton needs to launch on it."""
    import torch

    from .. import __version__

    section, card = "machine", facts.gpu()
    lines = [
        Line(section, "GPU", mark=OK if card.usable else NO, value=card.reason, remedy=card.remedy),
        Line(section, "driver", mark="", value=facts.driver_version() if card.usable else "-"),
        Line(section, "CPU", mark="", value=facts.cpu_name()),
        Line(section, "system", "", f"{platform.platform()}, Python {sys.version.split()[0]}"),
        Line(section, "tilewise", mark="", value=f"{__version__} ({facts.commit()})"),
        Line(section, "torch", "", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
    ]
    triton = facts.triton_version()
    if triton == "none":
        remedy = "`pip install triton` (Linux); the CPU backend needs none"
        lines.append(Line(section, "triton", mark=NO, value="not installed", remedy=remedy))
    else:
        lines.append(Line(section, "triton", mark=OK, value=triton))
    answers = {"C compiler": facts.c_compiler(), "Python headers": facts.python_headers()}
    for name, answer in answers.items():
        line = Line(section, name, OK if answer.usable else NO, answer.reason, answer.remedy)
        lines.append(line)
    return lines


def backends() -> list[Line]:
    """Each backend's own answer to a causal problem with grouped heads, on each device here."""
    import torch

    from .. import dispatch

    lines = []
    for device, dtype in devices().items():
        problem, chosen = facts.typical(dtype, right=0), False
        for name in dispatch.BACKENDS:
            reason = dispatch.ask(name, problem, torch.device(device))
            value = reason or ("usable" if chosen else "usable, and the one that is chosen")
            chosen = chosen or reason is None
            lines.append(Line(f"backends for {device} tensors", name, NO if reason else OK, value))
    return lines


def features() -> list[Line]:
    """Which of the usable backends serve each feature, best first, and why the others do not."""
    lines = []
    for device, dtype in devices().items():
        lines += [*served(device, dtype), fp8(device)]
    return lines


def served(device: str, dtype: torch.dtype) -> list[Line]:
    """The features, but FP8, on a device. A backend that refuses the plain problem is left out: it
    serves nothing there.
    """
    import torch

    from .. import dispatch

    cases, on = problems(dtype), torch.device(device)
    usable = [name for name in dispatch.BACKENDS if dispatch.ask(name, cases["plain"], on) is None]
    lines = []
    for feature, problem in cases.items():
        answers = {name: dispatch.ask(name, problem, on) for name in usable}
        refusals = {name: reason for name, reason in answers.items() if reason is not None}
        serving = ", ".join(name for name in usable if name not in refusals)
        mark, reasons = OK if serving else NO, _said(refusals)
        lines.append(Line(FEATURES_FOR.format(device), feature, mark, serving or "none", reasons))
    return lines


def problems(dtype: torch.dtype) -> dict[str, Problem]:
    """A problem that asks for one feature, by the feature's name."""
    import torch

    from .. import mods
    from ..features import FEATURES
    from ..problem import Mods

    plain = facts.typical(dtype)
    mask = Mods(mask=mods.causal().key)
    blocks = mask._replace(block=(128, 128))
    halved = mods.score(lambda score, b, h, q_idx, kv_idx: score / 2)
    changes = {
        "causal": dict(has_right=True),
        "window": dict(has_left=True, has_right=True),
        **{x.title: {x.flag: True} for x in FEATURES.values() if x.flag},
        "mask_mod": dict(mods=mask),
        "block_mask": dict(mods=blocks),
        "block_mask, deterministic gradients": dict(mods=blocks, deterministic=True),
        "score_mod": dict(mods=Mods(score=halved.key, derivative=halved.derivative.key)),
        "bias": dict(has_bias=True),
        "bias, its gradient": dict(has_bias=True, has_bias_grad=True),
        "dropout": dict(has_dropout=True),
        "float32": dict(dtype=torch.float32),
        "float64": dict(dtype=torch.float64),
        "headdim 32": dict(headdim=32, headdim_v=32),
        "headdim 72": dict(headdim=72, headdim_v=72),
        "headdim 100": dict(headdim=100, headdim_v=100),
        "headdim 256": dict(headdim=256, headdim_v=256),
        "headdim 512": dict(headdim=512, headdim_v=512),
        "headdim 513": dict(headdim=513, headdim_v=513),
        "headdim_v other than headdim": dict(headdim=192, headdim_v=128),
    }
    return {"plain": plain} | {name: plain._replace(**fields) for name, fields in changes.items()}


def fp8(device: str) -> Line:
    """Which backend serves e4m3 q, k and v, and whether its products run in 8 bits."""
    import torch

    from .. import dispatch

    problem, on = facts.typical(torch.float8_e4m3fn), torch.device(device)
    section, reasons = FEATURES_FOR.format(device), {}
    for name in dispatch.BACKENDS:
        reason = dispatch.ask_fp8(name, problem, on, torch.bfloat16)
        if reason is None:
            from ..explain.dense import products_of

            target = "cpu"
            if on.type == "cuda":
                from ..tuning.select import architecture

                target = architecture(on)
            return Line(section, "FP8", mark=OK, value=f"{name}: {products_of(name, target)}")
        reasons[name] = reason
    return Line(section, "FP8", mark=NO, value="none", remedy=_said(reasons))


def _said(refusals: dict[str, str]) -> str:
    """Why backends do not serve a feature."""
    return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())


def devices() -> dict:
    """The devices here, and the dtype in which each is asked."""
    import torch

    gpus = {"cuda": torch.bfloat16} if torch.cuda.is_available() else {}
    return {**gpus, "cpu": torch.float32}


def caches() -> list[Line]:
    """Where kernels and measured configurations are kept."""
    kernels = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    lines = [Line("caches", "compiled kernels", mark="", value=_sized(kernels))]
    try:
        from ..tuning.store import cache_file

        measured = cache_file()
    except ImportError:  # the tables name kernels of a Triton that is not here
        return lines
    lines.append(Line("caches", "tuned here", mark="", value=_sized(measured)))
    lines.append(Line("caches", "tuning table", mark="", value=tuning_table(measured)))
    return lines


def tuning_table(measured: Path) -> str:
    """Which configurations launches on this GPU take."""
    import torch

    from ..tuning.tables import TABLE

    if not torch.cuda.is_available():
        return "none: no GPU"
    from ..tuning.select import architecture, user_table

    device = torch.device("cuda")
    tuned, arch = len(user_table(device)), architecture(device)
    shipped = sum(key.arch == arch for key in TABLE)
    return f"{tuned} rows tuned on this GPU, {shipped} shipped for {arch}, else the default rule"


def integrations() -> list[Line]:
    """Libraries that can call tilewise, and the call that tells them."""
    lines = [of_torch()]
    for package, next_step in REGISTERED.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            lines.append(Line("integrations", package, mark="", value="not installed"))
            continue
        call = f"call tilewise.integrations.{package}.register(), then {next_step}"
        lines.append(Line("integrations", package, OK, f"{version}: {registered(package)}", call))
    return lines


def of_torch() -> Line:
    """Whose torch's own attention is in this process."""
    import torch

    from ..integrations.torch_sdpa import is_enabled

    active = "tilewise" if is_enabled() else torch.nn.attention.current_flash_attention_impl()
    value = f"{torch.__version__}: F.scaled_dot_product_attention is {active or 'torch'}'s"
    return Line("integrations", "torch", mark=OK, value=value, remedy="call tilewise.enable_sdpa()")


def registered(package: str) -> str:
    """Whether this process has told the library; importing it to ask would tell nothing new."""
    if package not in sys.modules:
        return "not registered (registering is up to each process)"
    module = importlib.import_module(f"tilewise.integrations.{package}")
    return "registered" if module.is_registered() else "not registered"


def summary(lines: list[Line]) -> str:
    """One sentence."""
    chosen = [line for line in lines if "chosen" in line.value]
    served = ", ".join(f"{line.section.split()[2]} tensors by {line.name}" for line in chosen)
    missing = [line.name for line in lines if line.section == "machine" and line.mark == NO]
    lacking = f"; not here: {', '.join(missing)}" if missing else ""
    return f"tilewise serves {served or 'nothing'}{lacking}."


def as_markdown(lines: list[Line]) -> str:
    """A table for an issue."""
    rows = ["| | | | |", "|---|---|---|---|"]
    for line in lines:
        cells = (f"{line.section}: {line.name}", line.mark, line.value, line.remedy)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _sized(path: Path) -> str:
    if not path.exists():
        return f"{path} (empty)"
    return f"{path} ({facts.folder_size(path) / 2**20:.1f} MiB)"
