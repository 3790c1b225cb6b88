"""The last lines of a bench: geometric means, worst shapes, the best peer, peers without a row."""

import pytest

from benchmarks.bench.run import Outcome
from benchmarks.bench.shapes import square
from benchmarks.bench.standings import ratios_to_first, standings, summary
from benchmarks.bench.timer import Spread

SHORT, LONG = (square("fwd", seqlen, 128, False) for seqlen in (512, 16384))


def outcomes(shape, **ratios):
    """One shape: a provider's ratio, or the reason why it has none."""
    return [
        Outcome(shape, name, None, refused=value)
        if isinstance(value, str)
        else Outcome(shape, name, object(), Spread(value, value, value))
        for name, value in ratios.items()
    ]


DONE = [
    *outcomes(SHORT, tilewise=1.0, fa3=0.9, cudnn=1.6, flash=2.0, fa4="it is not installed"),
    *outcomes(LONG, tilewise=1.0, fa3=1.6, cudnn=1.1, flash=0.5, fa4="it is not installed"),
]


def line_of(lines, name):
    (line,) = [line for line in lines if line.strip().startswith(name)]
    return line


def test_a_line_a_peer_with_its_mean_and_its_worst_shape():
    lines = standings(DONE)
    assert lines[0].startswith("fwd: time of a peer / time of tilewise")
    assert line_of(lines, "fa3").split()[1:3] == ["1.200", "0.900"]
    assert f"{SHORT}, of 2 shapes" in line_of(lines, "fa3")
    assert line_of(lines, "flash").split()[1:3] == ["1.000", "0.500"]


def test_the_best_peer_is_the_fastest_of_three_at_each_shape():
    line = line_of(standings(DONE), "best peer (fa3, cudnn)")
    assert line.split(")")[1].split()[:2] == [f"{(0.9 * 1.1) ** 0.5:.3f}", "0.900"]
    assert not any("best peer" in x for x in standings(outcomes(SHORT, tilewise=1.0, flash=0.5)))


def test_a_peer_without_a_row_is_named_with_the_reason():
    lines = standings(DONE)
    assert line_of(lines, "fa4") == "fa4: no row at 2 of 2: it is not installed"
    wrong = [Outcome(SHORT, "flex", None, wrong="out: 1"), *outcomes(LONG, flex="no kernel")]
    assert "at 2 of 2, for one: WRONG: out: 1" in standings(wrong)[-1]


def test_directions_are_kept_apart():
    backward = outcomes(SHORT._replace(direction="bwd"), tilewise=1.0, fa3=4.0)
    lines = standings([*DONE, *backward])
    means = [line.split()[1] for line in lines if line.strip().startswith("fa3")]
    assert means == ["1.200", "4.000"]


def test_a_shape_without_the_first_provider_has_no_ratio():
    """There the peers are divided by one another."""
    lost = outcomes(LONG, tilewise="WRONG", fa3=1.0, cudnn=1.5)
    done = [*outcomes(SHORT, tilewise=1.0, fa3=0.9), *lost]
    assert ratios_to_first(done) == {SHORT: {"fa3": 0.9}}
    assert "fa3 0/1 (mean 0.900, worst 0.900)" in summary(done) and "cudnn" not in summary(done)
    assert line_of(standings(done), "tilewise") == "tilewise: no row at 1 of 2: WRONG"


def loaded(shape, **figures):
    """One shape: of a provider its flushed and its sustained ratio, and that of its joules."""
    return [
        Outcome(shape, name, object(), Spread(f, f, f), sustained=Spread(s, s, s), energy=joules)
        for name, (f, s, joules) in figures.items()
    ]


LOADED = [
    *loaded(SHORT, tilewise=(1, 1, 1), fa3=(0.9, 1.2, 1.5), cudnn=(1.6, 1.1, 1.5)),
    *loaded(LONG, tilewise=(1, 1, 1), fa3=(0.9, 0.8, 0.9), cudnn=(1.6, 1.4, 1.5)),
]


def test_sustained_ratios_stand_first_and_flushed_ones_beside_them():
    lines = standings(LOADED)
    titles = [line.split("  ")[0] for line in lines if line.startswith("fwd: ")]
    assert titles == [
        "fwd: sustained time of a peer / time of tilewise",
        "fwd: flushed time of a peer / time of tilewise",
        "fwd: joules of a peer / joules of tilewise",
    ]
    means = [line.split()[1:3] for line in lines if line.strip().startswith("fa3 ")]
    assert means == [["0.980", "0.800"], ["0.900", "0.900"], ["1.162", "0.900"]]


def test_the_sentence_is_of_sustained_ratios():
    assert summary(LOADED) == (
        "6 rows timed, 0 wrong; under sustained load not slower than fa3 1/2 (mean 0.980, worst"
        " 0.800), cudnn 2/2 (mean 1.241, worst 1.100), best peer (fa3, cudnn) 1/2 (mean 0.938,"
        " worst 0.800); joules not above those of fa3 1/2 (mean 1.162, worst 0.900), cudnn 2/2"
        " (mean 1.500, worst 1.500), best peer (fa3, cudnn) 1/2 (mean 1.162, worst 0.900)"
    )


@pytest.mark.parametrize("done", [[], outcomes(SHORT, tilewise="no GPU")])
def test_nothing_timed(done):
    assert len(standings(done)) == len(done)
    assert summary(done) == "0 rows timed, 0 wrong"
