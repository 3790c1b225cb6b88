"""The project's words are the field's: those of the papers, the CUDA guide and torch's docs.

`RETIRED` maps a coined word, as a regular expression over lower case, to what to say. The glossary
(docs/glossary.md) explains the field's words and is exempt.
"""

import re
from pathlib import Path

import pytest

import tilewise

ROOT = Path(tilewise.__file__).resolve().parents[2]
WHERE = "src", "docs", "tour", "tests", "examples", "benchmarks"
PAGES = "README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"
SUFFIXES = {".py", ".md", ".js", ".css"}
EXEMPT = "docs/glossary.md", "tests/structure/test_language.py"

RETIRED = {
    # Hopper
    r"copy engines?": "TMA",
    r"mailbox(es)?|make_mailbox": "work-tile messages",
    r"mails?": "message",
    r"letters? (to|from|for) (the|a|all|every|each)": "work-tile message",
    r"laps?": "phase",
    r"(take|takes|took|taking|by|in) turns": "alternate, are interleaved",
    r"(its|whose|their|tile's) turns?|order of turns|turn at a block": "semaphore, rank, order",
    r"(await|end|make)_turns?|turn_at|ask_partition|pass_partition": "wait, signal",
    r"(an?|the|each|every|one|per) turn of the loop|the loop turns": "iteration",
    r"registers are dealt": "setmaxnreg",
    r"seams?": "boundary, overlap",
    r"rings? of steps|ring of keys": "K and V pipeline",
    r"edge launch(es)?|run_edge": "pre- and post-processing kernels",
    r"labelled|(make|read|write)_labels?": "per-block metadata",
    r"is_bent|bents?|bends?|bending": "non-linear score_mod, apply_score_mod",
    r"on (its|their) way": "in flight",
    # Calls
    r"(the|this|front|its|one) doors?|doors? of": "argument validation",
    # but the module tilewise.faces and Hugging Face
    r"(?<![./`\"])(?<!import\s)(?<!ugging\s)(?<!as\s)faces?(?!\.py)": "drop-in functions, API",
    r"stand[_-]ins?|cpu_stand_ins": "fake; interpreter and emulator modes",
    r"look_of|looks? alike|looks? so before": "signature, cache key",
    r"again_of|launch_again|decode_again": "relaunch",
    r"extras_apart|told apart|told_apart": "distinct, distinguished",
    r"tells? \S+ (\S+ )?apart": "distinguishes",
    r"is_watched|watched": "needs_dispatcher, traced",
    r"heard|_listener": "recorded",
    r"reads_tiles": "loads_per_pair",
    r"asked of": "arguments of, requested from",
    r"culprits?": "argument at fault",
    r"beside (a|the|its)( kv)? cache": "with a KV cache",
    r"mend|mends|mended|mending": "fix",
    # A thread, a file or a number is not a person
    r"nobody('s)?": "no thread, no program, not ...",
    r"somebody|someone": "a caller, another process",
    r"anybody|anyone": "any code, any caller",
    r"everybody|everyone": "all programs, all queries",
    r"whoever|whomever": "whatever, the program that",
    r"whom": "which",
    r"(?<!people\s)(?<!users\s)(?<!those\s)(?<!readers\s)who": "which, that",
    r"he|him|his": "it, its",
    r"(fall|falls|fell) asleep|sleepers|wakes? everybody": "pauses, resumes",
    r"dies? of": "crashes on",
    r"pays? nothing|pays? for it": "no cost",
    r"gives itself away": "is detected",
    r"its kin": "its variants",
    # Plain English
    r"in silence": "silently",
    r"for ever": "forever",
    r"in vain": "without success",
    r"lest": "to avoid, so that ... not",
    r"anew": "again",
    r"(of )?those days": "earlier",
    r"(is|are|no) news": "within noise, unknown to",
    r"thrice": "three times",
    r"amid|amidst": "among",
    r"dearer": "slower, costs more",
    r"anyhow": "already",
    r"as ever|ever after|as it were|by heart": "as before, from then on",
    r"throw of dice": "random",
    r"one behind the other": "end to end, one after the other",
    r"chapter one": "the definition",
    r"stood (at|beside)": "was at, was next to",
}
RETIRED_CHINESE = {
    "拷贝引擎|复制引擎|搬运引擎": "TMA",
    "信箱|邮箱": "工作分块的消息",
    "没有人|无人问津": "没有线程",
    "轮到谁": "下一个运行的是哪个",
    "谁在等谁": "哪些分区在互相等待",
}


def compiled(words, before="", after=""):
    """(what a text must hold, a pattern, what to say) for each alternative. A space also matches a
    line break, with the mark of a comment.
    """
    for retired, say in words.items():
        for part in re.split(r"\|(?![^(]*\))", retired):
            plain = re.sub(r"\([^()]*\)\??|\[[^]]*\]\S*|.\?", " ", part)
            must = max(re.findall(r"\w+", plain), key=len)
            yield must, re.compile(before + part.replace(" ", r"[\s#>*]+") + after), say


ENGLISH = list(compiled(RETIRED, r"(?<![a-z0-9])", r"(?![a-z0-9])"))
CHINESE = list(compiled(RETIRED_CHINESE))


def files():
    for folder in WHERE:
        yield from sorted((ROOT / folder).rglob("*"))
    yield from (ROOT / page for page in PAGES)


def is_checked(name):
    if name.startswith(("docs/_build", "docs/jupyter_execute", *EXEMPT)):
        return False
    return not re.match(r"docs/tour/\d", name)  # copies of the tour, made for the site


def complaints(text, name):
    """What to say, for each retired word of a file."""
    for words, of in ((ENGLISH, text.lower()), (CHINESE, text)):
        for must, pattern, say in words:
            for found in pattern.finditer(of) if must in of else ():
                line = of.count("\n", 0, found.start()) + 1
                yield f'{name}:{line}: "{" ".join(found[0].split())}": say {say}'


@pytest.mark.parametrize("text", ["# the copy\n    # engine", "Whoever asks", "by its turn"])
def test_retired_words_are_found(text):
    assert len(list(complaints(text, "a file"))) == 1


@pytest.mark.parametrize("text", ["tilewise.faces", "overlaps", "those who come", "recommend"])
def test_others_are_not(text):
    assert not list(complaints(text, "a file"))


def test_words_are_the_fields():
    found = [
        complaint
        for path in files()
        if path.suffix in SUFFIXES and is_checked(name := path.relative_to(ROOT).as_posix())
        for complaint in complaints(path.read_text(encoding="utf-8"), name)
    ]
    assert not found, "\n".join(found)
