"""Which backend serves which feature, as the backends themselves say."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .machine import typical

if TYPE_CHECKING:
    import torch

    from ..problem import Problem


class Served(NamedTuple):
    """A feature: the backends that serve it, best first, and why the others do not."""

    feature: str
    backends: list[str]
    refusals: dict[str, str]


def problems(dtype: torch.dtype) -> dict[str, Problem]:
    """A problem that asks for one feature, by the feature's name."""
    import torch

    from .. import mods
    from ..features import FEATURES
    from ..problem import Mods

    plain = typical(dtype)
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


def served(device: str, dtype: torch.dtype) -> list[Served]:
    """Each feature's backends on a device. A backend that refuses the plain problem is left out:
    it serves nothing there.
    """
    import torch

    from .. import dispatch

    cases, on = problems(dtype), torch.device(device)
    usable = [name for name in dispatch.BACKENDS if dispatch.ask(name, cases["plain"], on) is None]
    rows = []
    for feature, problem in cases.items():
        answers = {name: dispatch.ask(name, problem, on) for name in usable}
        refusals = {name: str(reason) for name, reason in answers.items() if reason is not None}
        rows.append(Served(feature, [x for x in usable if x not in refusals], refusals=refusals))
    return rows
