"""Many cases in many processes: every look is one job, and what fails is told."""

from . import many
from .cached_cases import CACHED_LANES
from .lanes import LANES


def test_each_look_is_one_job():
    jobs = list(many.jobs_until(0.0))
    looks = [(job.kind, job.lane, seed % len_of(job)) for job in jobs for seed in {*job.seeds}]
    assert len({*looks}) == len(jobs)
    assert sum(len(job.seeds) for job in jobs) >= 1500


def len_of(job):
    return (CACHED_LANES if job.kind == "cached" else LANES)[job.lane].looks


def test_outcomes(monkeypatch):
    job = many.Job("dense", "cpu-cpu", range(3), float("inf"))
    assert many.outcomes_of(job)[1:] == ({"right": 3}, [])
    assert many.outcomes_of(job._replace(stop=0.0))[1] == {"not begun": 3}
    monkeypatch.setattr(many, "run", lambda case: 1 / 0)
    _, counts, faults = many.outcomes_of(job)
    assert counts == {"raised": 3} and "dense cpu-cpu seed 2: ZeroDivisionError" in faults[2]
