"""`tilewise mask` draws what the mask is, runs nothing of what it is given, and names what it
cannot read.
"""

import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

import torch  # noqa: E402

from tilewise.cli.__main__ import main  # noqa: E402
from tilewise.cli.mask import coarsen, parse  # noqa: E402
from tilewise.mods import causal, chunked, dilated, document, prefix_lm, sliding_window  # noqa: E402

NAMESPACE = "{http://www.w3.org/2000/svg}"


def invoke(*arguments, columns="80"):
    return testing.CliRunner(env={"COLUMNS": columns}).invoke(main, ["mask", *arguments])


def test_draws_causal():
    done = invoke("causal", "--seqlen", "512")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "causal: 512 queries x 512 keys in tiles of 128 x 128",
        "▒▒······",
        "██▒▒····",
        "████▒▒··",
        "██████▒▒",
        "██ full  ▒▒ partial  ·· skipped",
        "16 tiles: 6 full, 4 partial, 6 skipped (37.5 % of the work is skipped)",
    ]


def test_two_lengths_two_sides_and_k():
    done = invoke("sliding_window(left=200)", "--seqlen", "512,1k", "--block", "256,128")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].endswith("512 queries x 1024 keys in tiles of 256 x 128")
    assert lines[1:3] == ["▒▒██████████████", "▒▒▒▒▒▒██████████"]


def test_large_masks_are_drawn_coarser():
    done = invoke("causal", "--seqlen", "16k", columns="40")
    lines = done.output.splitlines()
    assert lines[-2] == "each mark is 7 x 7 tiles"
    assert len(lines[1]) == 38 and "16384 tiles" in done.output


def test_a_cell_is_partial_unless_its_tiles_agree():
    kinds = torch.tensor([[2, 2, 0], [2, 2, 0], [0, 2, 1]], dtype=torch.uint8)
    assert coarsen(kinds, 3, 3) == (kinds.tolist(), 1)
    assert coarsen(kinds, 2, 2) == ([[2, 0], [1, 1]], 2)


EXPRESSIONS = {
    "causal": causal(),
    "causal(-3)": causal(-3),
    "causal(diagonal=3)": causal(3),
    "sliding_window(7, None)": sliding_window(7),
    "prefix_lm(9) & ~chunked(5)": prefix_lm(9) & ~chunked(5),
    "causal & (dilated(2) | sliding_window(3, 0))": causal() & (dilated(2) | sliding_window(3, 0)),
    "document(10, 30)": document(torch.tensor([0] * 10 + [1] * 30, dtype=torch.int32)),
    "document(10, 99999999)": document(torch.tensor([0] * 10 + [1] * 30, dtype=torch.int32)),
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions(text):
    shape = (1, 1, 40, 40)
    assert torch.equal(parse(text, 40).dense(*shape), EXPRESSIONS[text].dense(*shape))


REFUSED = {
    "__import__('os')": "`__import__('os')` has no meaning in a mask",
    "causal.__class__": "`causal.__class__` has no meaning",
    "mask(causal)": "`mask(causal)` has no meaning",
    "(lambda: causal)()": "has no meaning",
    "[causal]": "`[causal]` has no meaning",
    "causal + causal": "`causal + causal` has no meaning",
    "causal and causal": "`causal and causal` has no meaning",
    "(-causal)": "`-causal` has no meaning",
    "3": "`3` has no meaning",
    "causal(1.5)": "`1.5` is no integer",
    "causal(True)": "`True` is no integer",
    "causal(2**40)": "`2 ** 40` is no integer",
    "causal(*[1])": "`*[1]` is no integer",
    "causal(1, 2)": "`causal(1, 2)`: causal() takes",
    "causal(**{'a': 1})": "is no integer",
    "chunked": "missing 1 required positional argument: 'size'",
    "chunked(0)": "size=0: it must be at least 1",
    "sliding_window(-5, 0)": "left=-5: it must be at least -1",
    "document": "document takes the lengths of documents",
    "document(0)": "document takes the lengths of documents",
    "document(100, 200)": "300 of 2048 tokens: document(100, 200, 1748) has all",
    "causal &": "is no expression",
    "": "is no expression",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_is_named(text):
    done = invoke(text, columns="400")
    assert done.exit_code == 2
    assert REFUSED[text] in done.output


def test_wrong_sizes_are_usage_errors():
    assert "multiples of 16" in invoke("causal", "--block", "100").output
    assert invoke("causal", "--seqlen", "1,2,3").exit_code == 2
    assert invoke("causal", "--seqlen", "0").exit_code == 2


def test_svg(tmp_path):
    file = tmp_path / "mask.svg"
    done = invoke("causal & ~sliding_window(300)", "--seqlen", "1k", "--svg", str(file))
    assert done.exit_code == 0 and "drawn in" in done.output
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert root.tag == f"{NAMESPACE}svg" and root.get("role") == "img"
    title, desc = (root.find(f"{NAMESPACE}{name}") for name in ("title", "desc"))
    assert title.text.startswith("causal & ~sliding_window(300): 1024 queries")
    assert f"{title.get('id')} {desc.get('id')}" == root.get("aria-labelledby")
    paths = {path.get("class"): path.get("d").count("M") for path in root.iter(f"{NAMESPACE}path")}
    kinds = "{full} full, {partial} partial, {skipped} skipped".format(**paths)
    assert f"64 tiles: {kinds}" in done.output and kinds in desc.text
    legend = [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert legend == [f"{kind} {paths[kind]}" for kind in ("full", "partial", "skipped")]


def test_svg_of_a_large_mask_is_small_and_a_bad_path_is_said(tmp_path):
    file = tmp_path / "mask.svg"
    assert invoke("causal", "--seqlen", "64k", "--svg", str(file)).exit_code == 0
    assert file.stat().st_size < 1 << 19
    done = invoke("causal", "--svg", str(file / "mask.svg"))
    assert done.exit_code == 2 and "is no folder" in done.output
