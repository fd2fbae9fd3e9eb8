"""Improvement: fills the slack of a state, and swaps what it keeps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jdelta._src.solver.chains import Chains
from jdelta._src.solver.director import MOVED, RECOMPUTE, SAVE, Codes, Numbers, code_of
from jdelta._src.solver.frontier import Frontier, Gap, descending
from jdelta._src.solver.problem import Item, Memory, Problem

_CORE, _COPIES, _SUMS, _BEST = 24, 4, 512, 128
"""Moves combined; how many of them may be equal; combinations kept; states proposed."""


class _Move(NamedTuple):
    """A change of one item to another decision, and roughly what it does.

    Attributes:
        rank: Seconds it loses per byte of the item, net of what kept bytes are worth.
        kept: Device bytes it adds.
        seconds: Seconds it adds.
        item: Index of the item.
        code: Its new decision.
    """

    rank: float
    kept: float
    seconds: float
    item: int
    code: int


class Exchange:
    """Combines small changes of one state into better ones for somewhat more or less capacity.

    The knapsack's core (Balas and Zemel 1980, doi:10.1287/opre.28.5.1130): near the hull only the
    few moves count whose seconds nearly balance their bytes at the local price. Their sums are
    enumerated and pruned to those that no other beats (Nemhauser and Ullmann 1969,
    doi:10.1287/mnsc.15.9.494), as if moves did not interact; the director then prices the most
    promising for what they are. Not in DELTA.
    """

    def __init__(self, problem: Problem, chains: Chains):
        items = problem.items
        self.chains = chains
        self.bytes = np.array([item.bytes for item in items], dtype=float)
        self.holding = np.array([item.holding for item in items], dtype=float)
        self.links = [_Link(items, memory) for memory in problem.memories]

    def propose(self, frontier: Frontier, gap: Gap) -> list[Codes]:
        """States that probably beat the frontier.

        Args:
            frontier: Where the state is, and what is to be beaten.
            gap: The state to change, and the seconds that a move may lose at the local price.

        Returns:
            Wishes for the director.
        """
        codes = frontier.codes[gap.state]
        price = frontier.price(gap.state)
        core = self._core(codes, price, gap.missing)
        kept, seconds, chosen = _sums(core, price)
        after = frontier.overhead[gap.state] + seconds
        better = after < frontier.at(frontier.kept[gap.state] + kept) - frontier.step
        score = np.where(better, seconds + price * kept, np.inf)
        best = np.argsort(score, kind="stable")[: min(_BEST, int(better.sum()))]
        return [_applied(codes, core, int(pattern)) for pattern in chosen[best]]

    def _core(self, codes: Codes, price: float, slack: float) -> list[_Move]:
        """The moves that lose least, without too many equal ones."""
        self.chains.start((codes != RECOMPUTE).tolist())
        core: list[_Move] = []
        copies: dict[tuple[str, str], int] = {}
        for move in sorted(self._moves(codes, price, slack)):
            kind = (f"{move.kept:.6g}", f"{move.seconds:.6g}")
            copies[kind] = copies.get(kind, 0) + 1
            if copies[kind] <= _COPIES:
                core.append(move)
            if len(core) == _CORE:
                break
        return core

    def _moves(self, codes: Codes, price: float, slack: float) -> list[_Move]:
        """All moves that lose no more than the slack."""
        limits = (slack + price * self.bytes).tolist()
        chain = np.array([self.chains.seconds(i, limit=limit) for i, limit in enumerate(limits)])
        exposures = [link.exposure(codes) for link in self.links]
        leave = sum((leave for _, leave in exposures), np.zeros(len(codes)))
        gone, saved, moved = codes == RECOMPUTE, codes == SAVE, codes >= MOVED
        useful = (self.bytes > 0) & ~(gone & (chain == 0))
        # Hidden seconds that a moved item sets free are worth as many bytes as it has.
        freed = saved | (moved & (leave == 0))
        spared = leave + self.holding * saved
        targets = (
            (RECOMPUTE, ~gone, -self.bytes * freed, chain - spared),
            (SAVE, gone | (leave > 0), self.bytes, self.holding - np.where(gone, chain, leave)),
            *(
                (
                    link.code,
                    link.room(codes) & ((enter > 0) | moved),
                    -self.bytes * saved,
                    enter - spared - chain * gone,
                )
                for link, (enter, _) in zip(self.links, exposures, strict=True)
            ),
        )
        moves: list[_Move] = []
        for code, allowed, kept, seconds in targets:
            lost = seconds + price * kept
            for index in np.flatnonzero(useful & allowed & (codes != code) & (lost <= slack)):
                i = int(index)
                rank = float(lost[i] / self.bytes[i])
                moves.append(_Move(rank, float(kept[i]), float(seconds[i]), i, code))
        return moves


class _Link:
    """The link to a memory, and what each item takes of it; nothing where it may not move.

    Attributes:
        code: Code of the items there.
    """

    def __init__(self, items: Sequence[Item], memory: Memory):
        moves = [item.move(memory.decision) for item in items]
        self.code = code_of(memory.decision)
        self.capacity = memory.capacity
        self.movable = np.array([move is not None for move in moves], dtype=bool)
        self.bytes = np.array([move.bytes if move else 0.0 for move in moves])
        self.bare = np.array([move.seconds_exposed if move else 0.0 for move in moves])
        out = np.array([move.seconds_out if move else 0.0 for move in moves])
        into = np.array([move.seconds_in if move else 0.0 for move in moves])
        self.directions = ((out, memory.hidden_out), (into, memory.hidden_in))

    def room(self, codes: Codes) -> npt.NDArray[np.bool_]:
        """Which items may move there, and find room."""
        left = self.capacity - float(self.bytes[codes == self.code].sum())
        return self.movable & (self.bytes <= left)

    def exposure(self, codes: Codes) -> tuple[Numbers, Numbers]:
        """Exposed seconds that moving each item there adds, and that bringing it back saves."""
        moved = codes == self.code
        enter, leave = self.bare.copy(), self.bare * moved
        for seconds, hidden in self.directions:
            excess = float(seconds[moved].sum()) - hidden
            enter += np.maximum(excess + seconds, 0.0) - max(excess, 0.0)
            leave[moved] += max(excess, 0.0) - np.maximum(excess - seconds[moved], 0.0)
        return enter, leave


def _sums(core: list[_Move], price: float) -> tuple[Numbers, Numbers, npt.NDArray[np.int64]]:
    """Unbeaten sums of moves: kept bytes, seconds, and which moves, as bits."""
    kept, seconds = np.zeros(1), np.zeros(1)
    chosen = np.zeros(1, dtype=np.int64)
    for bit, move in enumerate(core):
        kept = np.append(kept, kept + move.kept)
        seconds = np.append(seconds, seconds + move.seconds)
        chosen = np.append(chosen, chosen | (1 << bit))
        order = np.lexsort((seconds, kept))
        order = order[descending(seconds[order], 0.0)]
        score = seconds[order] + price * kept[order]
        order = order[np.sort(np.argsort(score, kind="stable")[:_SUMS])]
        kept, seconds, chosen = kept[order], seconds[order], chosen[order]
    return kept, seconds, chosen


def _applied(codes: Codes, core: list[_Move], pattern: int) -> Codes:
    """A state after some of the moves."""
    changed = codes.copy()
    for bit, move in enumerate(core):
        if pattern >> bit & 1:
            changed[move.item] = move.code
    return changed
