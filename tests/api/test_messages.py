"""What wrong calls say, word for word: `messages.txt` has each call and below it the message.

A message that changes on purpose, and the messages of new calls, are written by

    PYTHONPATH=src:tests python tests/api/test_messages.py
"""

import inspect
import re
import textwrap
import warnings
from pathlib import Path

import torch
import torch.nn.attention.bias
import torch.nn.attention.flex_attention

import tilewise
import tilewise.bert_padding
import tilewise.distributed
from tilewise import errors, keywords

PAGE = Path(__file__).with_name("messages.txt")


def names():
    """What calls are made of: right tensors, (batch, seqlen, nheads, headdim) = (2, 8, 4, 16)."""
    q, k, v = torch.zeros(3, 2, 8, 4, 16).unbind(0)
    made = {name: getattr(tilewise, name) for name in dir(tilewise)}
    made |= dict(torch=torch, q=q, k=k, v=v, rows=q.flatten(0, 1))
    made |= dict(zeros=torch.zeros, ints=lambda *x: torch.tensor(x, dtype=torch.int32))
    made |= dict(starts=torch.tensor([0, 5, 16], dtype=torch.int32))
    made |= dict(
        pages=torch.zeros(8, 4, 4, 16), table=torch.arange(8, dtype=torch.int32).view(2, 4)
    )
    made |= dict(e4m3=q.to(torch.float8_e4m3fn), quantized=tilewise.quantize(q, k, v))
    blocks = tilewise.sparse.create_block_mask(tilewise.mods.causal(), 1, 1, 16, 16)
    return made | dict(blocks=blocks, layout=tilewise.distributed.zigzag(8, 1))


def said_by(call, names):
    """The warnings of a call, and its error, or what it returns if that is a text."""
    errors._said.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = eval(call, dict(names))
            said = [result] if isinstance(result, str) else []
        except Exception as error:
            said = [error]
    ours = [w.message for w in warned if not issubclass(w.category, DeprecationWarning)]
    said = [*ours, *said]
    return [x if isinstance(x, str) else f"{type(x).__name__}: {x}" for x in said]


def page():
    """The page again, with the messages of today."""
    lines, made = [], names()
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            for said in said_by(line, made) or ["nothing"]:
                for part in said.splitlines():
                    indents = dict(initial_indent="    ", subsequent_indent="    ")
                    lines += textwrap.wrap(part, 100, break_long_words=False, **indents)
    return "\n".join(lines) + "\n"


def test_wrong_calls_say_what_they_said(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    command = "PYTHONPATH=src:tests python tests/api/test_messages.py writes it"
    assert page() == PAGE.read_text("utf-8"), command


def test_warnings_that_a_page_quotes_exist():
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    section = page.read_text("utf-8").split("\n## `PerformanceWarning`\n")[1].split("\n## ")[0]
    quoted = [" ".join(x.split()) for x in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", section)]
    assert len(quoted) > 8
    parts = [x.strip(" .") for quote in quoted for x in quote.split("...")]
    sources = Path(tilewise.__file__).parent.rglob("*.py")
    source = "\n".join(path.read_text("utf-8") for path in sources)
    joined = re.sub(r'["\']\n +f?["\']', "", source)  # a text that goes on in the next line
    assert [x for x in parts if x not in joined] == []


def test_functions_of_attentions_arguments_answer_unknown_ones():
    """They end in `**unknown`, which their signatures do not show."""
    passing = "flash_attn_combine", "flash_attn_varlen_qkvpacked_func"
    passing = *passing, "flash_attn_varlen_kvpacked_func"  # options of flash_attn_varlen_func
    for name in tilewise.__all__:
        if re.search("attn|attention|quantize$", name) and name not in passing:
            shown = inspect.signature(getattr(tilewise, name)).parameters
            assert keywords._arguments[f"tilewise.{name}"] == list(shown)
            assert "unknown" not in shown


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
