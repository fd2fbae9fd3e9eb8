"""A stand-in for the compiler: it lowers a program to what is known of it, and measures nothing."""

import dataclasses
import functools

from jdelta._src.backends.chips import Rates
from jdelta._src.hlo.measure import Measurement
from jdelta._src.passes.emit import emit

EXACT = Measurement(0, 0, 0, 0, 0, 0, 0, 0, refused=False, seconds=0.0)
"""To be given a peak with `dataclasses.replace`."""


def lowering_to_itself(step, policy):
    """In the place of `emit`: what is lowered is the emission."""
    emission = emit(step, policy)
    return dataclasses.replace(emission, lower=lambda: emission)


def saying_what_is_predicted(emission, *_, **__):
    """In the place of `measure`: the peak is the simulated one, and there is no program."""
    return None, dataclasses.replace(EXACT, peak=emission.simulated)


class Later:
    """In the place of a lowered and of a compiled program: one that is compiled if it is called."""

    def __init__(self, emission):
        self.compiled = functools.cache(lambda: emission.lower().compile())
        self.measured = dataclasses.replace(EXACT, peak=emission.simulated)

    def __call__(self, *args):
        return self.compiled()(*args)


def lowering_later(step, policy):
    """In the place of `emit`: what is lowered is a `Later`."""
    emission = emit(step, policy)
    later = Later(emission)
    return dataclasses.replace(emission, lower=lambda: later)


def compiled_when_called(monkeypatch, emitted=lowering_later):
    """Have each program take what is predicted of it, and compile those that are run."""
    monkeypatch.setattr("jdelta._src.search.propose.emit", emitted)
    monkeypatch.setattr(
        "jdelta._src.search.history.measure", lambda later, *_, **__: (later, later.measured)
    )


def in_place_of_the_compiler(monkeypatch):
    """Have each program take what is predicted of it."""
    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", saying_what_is_predicted)


RATES = Rates(
    matmul=(("bfloat16", 1.3e11), ("float32", 1.3e11), ("float32 highest", 1.3e11)),
    vector=4.1e10,
    integer=5.6e10,
    bandwidth=1.76e10,
    device_to_host=8.8e9,
    host_to_device=8.8e9,
)
"""As measured on two cores that do nothing else."""


def as_on_an_idle_machine(monkeypatch):
    """Have plans for CPUs go by `RATES`: those that are measured depend on what else runs."""
    monkeypatch.setattr("jdelta._src.backends.target.measured_rates", lambda *_: RATES)
