"""Where figures come from: environments, and the command lines that take them again."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.explain.lengths import SETS
from tilewise.explain.shapes import Shape
from tilewise.explain.traffic import PASSES

from ..bench.row import Row
from ..bench.shapes import SUITES
from .evidence import Environment, Evidence, is_ours, shape_of
from .page import Code, Heading, Section, Table, plural

SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
SAVE = "--save rows.jsonl"
ROWS = "rows.jsonl"
EXPERIMENTS = (
    "decode",
    "distributed",
    "serving",
    "matmul",
    "memory",
    "io",
    "speedup",
    "blocks",
    "host",
    "cold",
)
BENCHES = "decode", "distributed", "serving"  # of these, commands of `python -m benchmarks bench`


def environments(evidence: Evidence) -> Section:
    """Device, versions, commits and dates of every row."""
    columns = ["device", "torch", "Triton", "CUDA", "driver", "commits", "dates", "rows", "runs"]
    body = []
    for environment, rows in evidence.by_environment(evidence.rows).items():
        days = sorted({row.date[:10] for row in rows})
        body.append(
            [
                *environment,
                *(_listed(getattr(row, name) for row in rows) for name in ("cuda", "driver")),
                _listed(_commit(row) for row in rows),
                days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
                f"{len(rows):,}",
                str(len({row.run for row in rows})),
            ]
        )
    caption = "Every environment that rows come from"
    table = Table(caption, columns, body, frozenset(columns[7:]))
    return Section("Environment", [table])


def _commit(row: Row) -> str:
    dirty = "+" if row.commit.endswith("+") else ""
    return row.commit.rstrip("+")[:10] + dirty


def _listed(values) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def reproduce(evidence: Evidence) -> Section:
    """The commands: all of them at once, then those that each run came from."""
    blocks: list = [
        "On a machine of your own, everything there is a command for, and this page from it:",
        Code(f"make bench-all report RESULTS={ROWS}"),
        f"The runs that rows of this page come from. Each appends to {ROWS}; `python -m benchmarks"
        f" report {ROWS}` makes a page of it, `python -m benchmarks compare OLD {ROWS}` says what"
        " has changed. Peers that are not installed are left out with the reason (`python -m"
        " benchmarks bench --help` says how FlashAttention-3 is found).",
    ]
    by_date = sorted(evidence.rows, key=lambda row: row.date)
    for environment, rows in evidence.by_environment(by_date).items():
        runs: dict[str, list[Row]] = {}
        for row in rows:
            runs.setdefault(row.run, []).append(row)
        blocks.append(Heading(str(environment)))
        blocks.append(Code("\n".join(_said(runs, environment))))
    return Section("How to reproduce", blocks)


def _said(runs: dict[str, list[Row]], environment: Environment) -> list[str]:
    commands: dict[tuple[str, str], int] = {}
    for rows in runs.values():
        at = f"# {rows[0].date[:10]}, commit {_commit(rows[0])}"
        for command in commands_of(rows):
            commands[at, command] = commands.get((at, command), 0) + len(rows)
    lines, last = [], ""
    for at, command in commands:
        if at != last:
            lines.append(at)
            last = at
        lines.append(command)
    return lines


def commands_of(rows: Sequence[Row]) -> list[str]:
    """The commands that take the shapes of one run again."""
    suite = rows[0].suite
    if suite in EXPERIMENTS:
        counted = suite == "io" and any("bytes_read" in row.extra for row in rows)
        kinds = ",".join(_unique(str(row.shape["kind"]) for row in rows if "kind" in row.shape))
        words = ["--counters"] * counted + [f"--dtype {kinds}"] * bool(kinds)
        bench = "python -m benchmarks bench" if suite in BENCHES else "python -m benchmarks"
        return [" ".join([bench, suite, *words, SAVE])]
    if suite.startswith("tour/"):
        lesson = suite.removeprefix("tour/")
        return [f"TILEWISE_RECORD={ROWS} python tour/{lesson}.py"]
    shapes = [shape_of(row) for row in rows]
    known = [shape for shape in shapes if shape is not None]
    if suite == "modifiers":
        return [_modifiers(rows, known)]
    if len(known) < len(rows):
        return [f"# suite {suite}, {plural(len(rows), 'row')}: by the command that has its name"]
    if suite == "varlen":
        return [_varlen(rows, [shape for shape in known if shape.lengths])]
    if suite == "cpu" and any(row.provider == "sdpa" for row in rows):
        return [_on_cpu(known)]
    if suite in SUITES:
        return [f"python -m benchmarks bench --suite {suite}{_tail(rows)}"]
    families: dict[tuple, list[Row]] = {}
    for row, shape in zip(rows, known):
        families.setdefault(_options(shape), []).append(row)
    return [_dense(of, options) for options, of in families.items()]


def _dense(rows: Sequence[Row], options: tuple) -> str:
    shapes = [Shape(**row.shape) for row in rows]
    words = ["python -m benchmarks bench", *_directions(shapes)]
    words.append(f"--seqlen {_sorted(s.seqlen_k for s in shapes)}")
    words.append(f"--headdim {_sorted(s.headdim for s in shapes)}")
    words.append(f"--causal {_causal(shapes)}")
    words += [f"--{name} {value}" if value is not True else f"--{name}" for name, value in options]
    if any(shape.seqlen_q != shape.seqlen_k for shape in shapes):
        words.append("# but with other lengths of queries")
    return " ".join(words) + _tail(rows)


def _options(shape: Shape) -> tuple:
    """Options that a run has once for all its shapes, as they differ from the defaults."""
    tokens, hidden = shape.batch * shape.seqlen_k, shape.nheads * shape.headdim
    asked = {
        "tokens": (_short(tokens), "16k"),
        "hidden": (str(hidden), "2048"),
        "headdim-v": (shape.headdim_v if shape.headdim_v != shape.headdim else None, None),
        "group": (shape.nheads // shape.nheads_k, 1),
        "dtype": (SHORT_DTYPES.get(shape.dtype, shape.dtype), "bf16"),
        "window": (shape.window, None),
        "softcap": (f"{shape.softcap:g}", "0"),
        "alibi": (shape.alibi, False),
        "sinks": (shape.sinks, False),
    }
    return tuple((name, value) for name, (value, default) in asked.items() if value != default)


def _varlen(rows: Sequence[Row], shapes: Sequence[Shape]) -> str:
    own = [name for name in _unique(s.lengths for s in shapes) if name not in SETS]
    names = ",".join(_unique(s.lengths for s in shapes)) if not own else own[0]
    dense = " --dense" if any("beside" in row.extra for row in rows) else ""
    return (
        f"python -m benchmarks bench varlen --lengths {names} --heads {_heads(shapes)}"
        f" --pass {','.join(_directions(shapes))} --causal {_causal(shapes)}"
        f"{_dtype(shapes)}{dense}{_tail(rows)}"
    )


def _modifiers(rows: Sequence[Row], shapes: Sequence[Shape]) -> str:
    dense = [shape for shape in shapes if not shape.lengths]
    cases = ",".join(_unique(str(row.extra["modifier"]) for row in rows if "modifier" in row.extra))
    tokens = _short(max(shape.batch * shape.seqlen_q for shape in dense))
    lanes = _unique(str(row.extra["lane"]) for row in rows if row.extra.get("lane"))
    against = f" --against {','.join(lanes)}" if lanes else ""
    return (
        f"python -m benchmarks bench modifiers --cases {cases}"
        f" --pass {','.join(_directions(dense))}"
        f" --seqlens {_sorted(s.seqlen_q for s in dense)} --tokens {tokens}"
        f" --heads {_heads(dense)}{_dtype(dense)}{against} --rounds {len(rows[0].rounds_ms)} {SAVE}"
    )


def _on_cpu(shapes: Sequence[Shape]) -> str:
    lengths = ",".join(str(n) for n in sorted({shape.seqlen_q for shape in shapes}))
    dtypes = ",".join(_unique(shape.dtype for shape in shapes))
    return f"python -m benchmarks cpu --seqlen {lengths} --dtype {dtypes}"


def _tail(rows: Sequence[Row]) -> str:
    """Providers, rounds, and where rows go."""
    providers = _unique(row.provider for row in rows)
    ours = "tilewise" if "tilewise" in providers else next(filter(is_ours, providers), "tilewise")
    others = ",".join(name for name in providers if name != ours)
    named = "" if ours == "tilewise" else f" --provider {ours}"
    against = f" --against {others}" if others else " --against ''"
    ways = " --sustained" if any(row.sustained_ms for row in rows) else ""
    ways = " --energy" if any(row.joules for row in rows) else ways
    return f"{named}{against} --rounds {len(rows[0].rounds_ms)}{ways} {SAVE}"


def _heads(shapes: Sequence[Shape]) -> str:
    return ",".join(
        _unique(
            f"{s.nheads}{f':{s.nheads_k}' if s.nheads_k != s.nheads else ''}x{s.headdim}"
            for s in shapes
        )
    )


def _directions(shapes: Sequence[Shape]) -> list[str]:
    asked = {shape.direction for shape in shapes}
    return [direction for direction in PASSES if direction in asked]


def _causal(shapes: Sequence[Shape]) -> str:
    asked = {shape.causal for shape in shapes}
    return "both" if len(asked) == 2 else "yes" if True in asked else "no"


def _dtype(shapes: Sequence[Shape]) -> str:
    name = shapes[0].dtype
    return "" if name == "bfloat16" else f" --dtype {SHORT_DTYPES.get(name, name)}"


def _short(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 and number else str(number)


def _sorted(numbers) -> str:
    return ",".join(_short(number) for number in sorted(set(numbers)))


def _unique(values) -> list[str]:
    return list(dict.fromkeys(values))
