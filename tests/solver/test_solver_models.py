"""Solvers on models: the heuristic against the exact solver, and the exact solver's limits."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from jdelta._src.decision import Decision
from jdelta._src.solver import Knapsack, Milp, Solver
from jdelta._src.solver import knapsack as knapsack_module
from jdelta._src.solver.problem import AWAY, Item, Move, Problem
from jdelta._src.solver.solution import Outcome
from tests.crossed import crossed
from tests.solver_problems import files, host
from tests.solver_validate import validate

FLOPS, MEMORY = 4e14, 2e12  # Rates of an accelerator, per second.


class Builder:
    """Builds items from FLOPs, with traffic of twice the bytes."""

    def __init__(self, link: float = 0.0, files: float = 0.0):
        self.items: list[Item] = []
        self.link = link
        self.files = files

    def add(self, size: float, flops: float, *sources: int, needed: bool = True) -> int:
        seconds = flops / FLOPS + 2 * size / MEMORY
        moves = [
            Move(to, size / rate, size / rate, size)
            for to, rate in zip(AWAY, (self.link, self.files), strict=True)
            if rate and size > 2**20
        ]
        item = Item(f"v{len(self.items)}", size, seconds, sources, needed, tuple(moves))
        self.items.append(item)
        return len(self.items) - 1


def transformer(layers: int, link: float = 0.0, files: float = 0.0) -> tuple[Item, ...]:
    """Residuals of a decoder: batch 4, length 1024, width 1600, 25 heads, without dropout."""
    b, n, d, heads = 4, 1024, 1600, 25
    unit, product = 2.0 * b * n * d, 2.0 * b * n * d * d
    scores, attend = 2.0 * b * heads * n * n, 2.0 * b * n * n * d
    build = Builder(link, files)
    x = build.add(unit, 0, needed=False)
    for _ in range(layers):
        statistics = build.add(8.0 * b * n, 0, x)
        h = build.add(unit, 0, x, statistics)
        qkv = build.add(3 * unit, 3 * product, h)
        logits = build.add(scores, attend, qkv, needed=False)
        weights = build.add(scores, 0, logits)
        context = build.add(unit, attend, weights, qkv)
        output = build.add(unit, product, context, needed=False)
        x = build.add(unit, 0, x, output, needed=False)
        statistics = build.add(8.0 * b * n, 0, x)
        h = build.add(unit, 0, x, statistics)
        wide = build.add(4 * unit, 4 * product, h)
        gelu = build.add(4 * unit, 0, wide)
        narrow = build.add(unit, 4 * product, gelu, needed=False)
        x = build.add(unit, 0, x, narrow, needed=False)
    return tuple(build.items)


def resnet(link: float = 0.0) -> tuple[Item, ...]:
    """Residuals of a ResNet-50 at 224 x 224, batch 64: four stages of different sizes."""
    build = Builder(link)
    pixels, x, inputs = 64 * 56.0**2, -1, 64
    x = build.add(2 * pixels * 64, 2 * 64 * 112.0**2 * 64 * 147)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            h, depth = x, inputs
            for kernel, channels in ((1, width), (9, width), (1, 4 * width)):
                if kernel == 9 and block == 0 and stage:
                    pixels /= 4
                flops = 2 * pixels * depth * channels * kernel
                convolved = build.add(2 * pixels * channels, flops, h)
                statistics = build.add(8.0 * channels, 0, convolved)
                last = channels == 4 * width
                h = build.add(2 * pixels * channels, 0, convolved, statistics, needed=not last)
                depth = channels
            x = build.add(2 * pixels * 4 * width, 0, x, h)
            inputs = 4 * width
    return tuple(build.items)


def scattered(count: int) -> tuple[Item, ...]:
    """Items whose bytes and seconds span three orders of magnitude, in loose chains."""
    generator = random.Random(count)
    build = Builder()
    for k in range(count):
        indices = {k - 1 - int(generator.expovariate(0.5)) for _ in range(generator.randint(0, 2))}
        sources = tuple(sorted(s for s in indices if s >= 0))
        size, flops = int(2 ** generator.uniform(20, 30)), 10 ** generator.uniform(8, 12.5)
        build.add(size, flops, *sources, needed=generator.random() < 0.7)
    return tuple(build.items)


def stacked(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Items that cost copies of five times their bytes to save, as rows of a GPU's loop."""
    return tuple(replace(item, holding=5 * item.bytes / MEMORY) for item in items)


def share(problem: Problem, overhead: float, best: float) -> float:
    """Value of an overhead, as part of the value of the best one."""
    nothing = problem.overhead([Decision.RECOMPUTE] * len(problem.items))
    return (nothing - overhead) / (nothing - best) if nothing > best else 1.0


def modelled(items: tuple[Item, ...], part: float, hidden: float = 0.0) -> Problem:
    """A problem with a part of all bytes as capacity, and of all seconds as hidden ones."""
    seconds = hidden * sum(item.seconds for item in items)
    total = sum(item.bytes for item in items)
    return Problem(items, part * total, host(math.inf, seconds, 2 * seconds))


MODELS = {
    **{f"12 layers {p}": modelled(transformer(12), p) for p in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)},
    **{f"24 layers {p}": modelled(transformer(24), p) for p in (0.2, 0.5, 0.7)},
    **{f"48 layers {p}": modelled(transformer(48), p) for p in (0.3, 0.5, 0.9)},
    **{f"ResNet {p}": modelled(resnet(), p) for p in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)},
    **{f"slow link {p}": modelled(transformer(12, 25e9), p, 1.0) for p in (0.1, 0.2, 0.5)},
    **{f"fast link {p}": modelled(resnet(2e11), p, 0.05) for p in (0.1, 0.5, 0.7)},
    **{f"in a GPU's loop {p}": modelled(stacked(transformer(1)), p) for p in (0.2, 0.5, 0.9)},
    **{f"1000 scattered {p}": modelled(scattered(1000), p) for p in (0.2, 0.5)},
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str):
    problem = MODELS[name]
    exact = Milp(time_limit=3.0, mip_rel_gap=1e-3).solve(problem)
    heuristic = Knapsack().solve(problem)
    assert validate(problem, exact) == []
    assert validate(problem, heuristic) == []
    assert share(problem, heuristic.overhead, exact.overhead) >= 0.99


@pytest.mark.parametrize(
    ("part", "share_of_host"), [(0.3, 0.02), (0.1, 0.1), (0.3, 0.1), (0.1, 0.3)]
)
def test_host_capacity_with_a_quick_link(part: float, share_of_host: float):
    problem = modelled(transformer(12, 3e12), part)
    room = share_of_host * sum(move.bytes for i in problem.items for move in i.moves)
    problem = replace(problem, memories=host(room))
    exact = Milp(time_limit=3.0, mip_rel_gap=1e-3).solve(problem)
    heuristic = Knapsack().solve(problem)
    assert validate(problem, heuristic) == []
    assert heuristic.moved_bytes[0] > 0
    assert share(problem, heuristic.overhead, exact.overhead) >= 0.99


@crossed(rooms=[(0.1, 0.5), (0.3, 0.5), (0.05, 0.5), (0.05, 0.05)], part=[0.1, 0.2, 0.5])
def test_files_beside_the_host(part: float, rooms: tuple[float, float]):
    room, far = rooms
    items = transformer(12, 25e9, 6e9)
    total, seconds = sum(i.bytes for i in items), sum(i.seconds for i in items)
    links = host(room * total, seconds, 2 * seconds) + files(far * total, seconds, 2 * seconds)
    problem = Problem(items, part * total, links)
    exact = Milp(time_limit=3.0, mip_rel_gap=1e-3).solve(problem)
    heuristic = Knapsack().solve(problem)
    assert validate(problem, exact) == []
    assert validate(problem, heuristic) == []
    assert heuristic.moved_bytes[1] > 0
    assert share(problem, heuristic.overhead, exact.overhead) >= 0.99
    host_only = replace(problem, items=transformer(12, 25e9))
    assert heuristic.overhead < Knapsack().solve(host_only).overhead


@crossed(part=[0.05, 0.1, 0.3], share_of_step=[0.05, 0.3, 1.0])
def test_links_that_take_little(part: float, share_of_step: float):
    """The worst that was found is 0.992, with room for 5 % on the device too."""
    items = transformer(12, 25e9, 6e9)
    room, hidden = 0.05 * sum(i.bytes for i in items), share_of_step * sum(i.seconds for i in items)
    links = host(room, hidden, 2 * hidden) + files(room, hidden, 2 * hidden)
    problem = Problem(items, part * sum(i.bytes for i in items), links)
    exact = Milp(time_limit=3.0, mip_rel_gap=1e-3).solve(problem)
    assert share(problem, Knapsack().solve(problem).overhead, exact.overhead) >= 0.99


def test_one_large_item_among_many():
    tokens, width, words = 4 * 1024, 1600, 50257
    body = transformer(12)
    logits = Item("logits", 2.0 * tokens * words, 2.0 * tokens * width * words / FLOPS, (167,))
    problem = modelled((*body, logits), 0.2)
    exact = Milp(time_limit=3.0, mip_rel_gap=1e-3).solve(problem)
    assert share(problem, Knapsack().solve(problem).overhead, exact.overhead) >= 0.995


def test_offload_lowers_overhead():
    without, slow = modelled(transformer(12), 0.2), modelled(transformer(12, 25e9), 0.2, 1.0)
    assert Knapsack().solve(slow).overhead < 0.9 * Knapsack().solve(without).overhead


def test_frontier_does_not_rise_on_a_model():
    items = transformer(12)
    total = sum(item.bytes for item in items)
    capacities = np.linspace(0.0, total, 301)
    overheads = [Knapsack().solve(Problem(items, c)).overhead for c in capacities]
    assert overheads == sorted(overheads, reverse=True)
    assert len(set(overheads)) > 100


@pytest.mark.parametrize("solver", [Knapsack(), Milp()], ids=lambda s: type(s).__name__)
def test_deterministic(solver: Solver):
    problem = modelled(scattered(60), 0.3)
    first = solver.solve(problem)
    knapsack_module._frontier.cache_clear()
    assert solver.solve(problem) == first


def test_improvement_improves():
    problem = modelled(resnet(), 0.5)
    assert Knapsack().solve(problem).overhead < Knapsack(rounds=0).solve(problem).overhead


def test_milp_stops_at_its_time_limit():
    problem = modelled(transformer(24), 0.1)
    solution = Milp(time_limit=0.0).solve(problem)
    assert solution.outcome is Outcome.TIME_LIMIT
    assert validate(problem, solution) == []


def test_milp_stops_at_its_gap():
    problem = modelled(transformer(12), 0.3)
    loose, tight = Milp(mip_rel_gap=0.3).solve(problem), Milp(mip_rel_gap=1e-3).solve(problem)
    assert tight.overhead * (1 - 1e-3) <= loose.overhead <= tight.overhead / 0.7
