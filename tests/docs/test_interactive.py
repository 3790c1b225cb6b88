"""The pieces' arithmetic in Node, held to Python: the same numbers as the library's own."""

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waits import DEADLINE

from tilewise.testing.schedule import busy, key_blocks, makespan, simulate, tiles

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "interactive"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")
SKIPPED, PARTIAL, FULL = range(3)


def node(program: str, data):
    """What a module's code gives for `data`; it says `answer(value)`, infinities as strings."""
    script = f"""
    import {{ readFileSync }} from "node:fs";
    const data = JSON.parse(readFileSync(0, "utf8"));
    const safe = (_, x) => (typeof x === "number" && !Number.isFinite(x) ? String(x) : x);
    const answer = (value) => console.log(JSON.stringify(value, safe));
    {program}"""
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", script],
        input=json.dumps(data),
        capture_output=True,
        text=True,
        cwd=FOLDER,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_schedules_are_those_of_python():
    draw = random.Random(0)
    cases = [
        dict(
            lengths=[draw.choice((0, 1, 128, draw.randrange(3000))) for _ in range(n)],
            nheads=draw.randrange(1, 5),
            block=draw.choice((64, 128, 256)),
            processors=draw.randrange(1, 13),
            causal=draw.random() < 0.5,
            longestFirst=draw.random() < 0.5,
        )
        for n in (1, 1, 2, 3, 5, 8, 13, 40)
        for _ in range(5)
    ]
    answers = node(
        """
        import { busy, makespan, plan } from "./tile_schedule.js";
        answer(data.map((choice) => {
          const made = plan(choice);
          const ends = [made.static, made.dynamic].map((runs) =>
            [makespan(runs), busy(runs, choice.processors)]);
          return { ...made, ends };
        }));""",
        cases,
    )
    for case, found in zip(cases, answers):
        lengths, block = case["lengths"], case["block"]
        numbered = list(tiles(lengths, case["nheads"], block, longest_first=case["longestFirst"]))
        assert [tuple(tile.values()) for tile in found["tiles"]] == [t[:4] for t in numbered]
        costs = [key_blocks(lengths[t.batch], t.m_block, block, case["causal"]) for t in numbered]
        assert found["costs"] == costs
        for place, name in enumerate(("static", "dynamic")):
            runs = simulate(costs, case["processors"], dynamic=name == "dynamic")
            assert [tuple(run.values()) for run in found[name]] == list(runs)
            until, share = found["ends"][place]
            assert until == makespan(runs)
            assert share == pytest.approx(busy(runs, case["processors"]))


def test_lengths_are_read_from_text():
    texts = ["160, 300", "1 2;3", "", "12, x", "-1", "1.5", "5, 99999"]
    found = node(
        """import { parseLengths } from "./tile_schedule.js";
        answer(data.map((text) => parseLengths(text, 4, 1000)));""",
        texts,
    )
    assert [x["lengths"] for x in found[:3]] == [[160, 300], [1, 2, 3], []]
    assert [bool(x["problem"]) for x in found] == [False] * 3 + [True] * 4


def visible(shape, q, k):
    if shape["mask"] == "full":
        return True
    return k <= q and (shape["mask"] != "window" or k >= q - shape["left"])


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_tiles_are_those_of_the_mask(mask):
    """Against every pair."""
    shapes = [
        dict(seqlen=s, blockM=m, blockN=n, headdim=64, mask=mask, left=left)
        for s, m, n, left in ((64, 16, 16, 9), (60, 16, 8, 20), (33, 8, 32, 0), (48, 32, 16, 100))
    ]
    found = node(
        """import { kinds, visits } from "./tile_walk.js";
        answer(data.map((shape) => ({ kinds: kinds(shape), visits: visits(shape) })));""",
        shapes,
    )
    for shape, answer in zip(shapes, found):
        s, m, n = shape["seqlen"], shape["blockM"], shape["blockN"]
        for row, its in enumerate(answer["kinds"]):
            queries = range(row * m, min(row * m + m, s))
            for column, kind in enumerate(its):
                keys = range(column * n, min(column * n + n, s))
                seen = [visible(shape, q, k) for q in queries for k in keys]
                assert kind == (FULL if all(seen) else PARTIAL if any(seen) else SKIPPED)
            mine = [v for v in answer["visits"] if v["m"] == row]
            order = [(v["kind"], v["n"]) for v in mine]
            assert order == sorted((kind, n) for n, kind in enumerate(its) if kind != SKIPPED)


def test_bytes_of_a_walk():
    """Q and O once, K and V for each block that is visited, the lse in fp32; S and P never."""
    shape = dict(seqlen=1024, blockM=128, blockN=128, headdim=64, mask="causal", left=0)
    found = node(
        """import * as walk from "./tile_walk.js";
        const all = walk.visits(data);
        answer([walk.flashBytes(all, all.length), walk.flashBytes(all, 1),
                walk.standardBytes(data, 1), walk.standardBytes(data, 0),
                walk.standardBytes(data, 0.5)]);""",
        shape,
    )
    tensor, matrix = 1024 * 64 * 2, 1024 * 1024 * 2
    tiles_seen = 8 * 9 // 2
    assert found[0] == {
        "read": tensor + tiles_seen * 2 * 128 * 64 * 2,
        "written": tensor + 1024 * 4,
    }
    assert found[1] == {"read": 3 * 128 * 64 * 2, "written": 128 * (64 * 2 + 4)}
    assert found[2]["read"] + found[2]["written"] == 4 * matrix + 4 * tensor
    assert (found[3]["read"], found[3]["written"]) == (0, 0)
    assert found[4]["read"] == 2 * tensor + matrix // 2  # the softmax is half done


def test_online_softmax_is_softmax():
    draw = random.Random(1)
    rows = [[draw.gauss(0, 5) for _ in range(n)] for n in (1, 2, 7, 16)]
    rows += [[1000.0, 1001.0, 1002.0], ["-Infinity"] * 4, ["-Infinity", 2.0, "-Infinity", 3.0]]
    data = [dict(s=row, v=[draw.gauss(0, 1) for _ in row], block=b) for row in rows for b in (1, 3)]
    found = node(
        """import { direct, finish, walk } from "./online_softmax.js";
        answer(data.map(({ s, v, block }) => {
          const logits = s.map(Number);
          const states = walk(logits, v, block);
          return { states, ours: finish(states[states.length - 1]), all: direct(logits, v) };
        }));""",
        data,
    )
    for asked, answer in zip(data, found):
        scores = [-math.inf if x == "-Infinity" else x for x in asked["s"]]
        m = max(scores)
        if m == -math.inf:
            assert answer["ours"] == answer["all"] == {"out": 0, "lse": "-Infinity"}
            continue
        p = [math.exp(x - m) for x in scores]
        out = sum(x * v for x, v in zip(p, asked["v"])) / sum(p)
        for name in ("ours", "all"):
            assert answer[name]["out"] == pytest.approx(out, abs=1e-12)
            assert answer[name]["lse"] == pytest.approx(m + math.log(sum(p)))
        last = answer["states"][-1]
        assert last["m"] == m and last["l"] == pytest.approx(sum(p))
        assert len(answer["states"]) == 1 + -(-len(scores) // asked["block"])


def test_scores_are_read_from_text():
    found = node(
        """import { parseNumbers } from "./online_softmax.js";
        answer(data.map(parseNumbers));""",
        ["1, -2.5", "-inf 3", "1, two", "inf", ""],
    )
    assert found[0] == {"numbers": [1, -2.5], "problem": ""}
    assert found[1]["numbers"] == ["-Infinity", 3] and not found[1]["problem"]
    assert found[2]["problem"] and found[3]["problem"] and not found[4]["problem"]


@pytest.mark.parametrize("piece", sorted(p.stem[:-5] for p in FOLDER.glob("*_view.js")))
def test_a_piece_is_one_plain_script(piece, tmp_path, monkeypatch):
    """Browsers load no module from a file; what is imported is in the script, once."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    monkeypatch.delitem(sys.modules, "interactive", raising=False)
    import interactive

    script = interactive.bundle(piece)
    assert "import " not in script and "export " not in script
    assert interactive.imported_by(f"{piece}_view")[-1] == f"{piece}_view"
    assert script.count("modules.dom = ") == 1
    (tmp_path / "piece.js").write_text(script, encoding="utf-8")
    done = subprocess.run([NODE, "--check", tmp_path / "piece.js"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
