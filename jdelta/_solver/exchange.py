"""Improvement: fills the slack of a state, and swaps what it keeps."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jdelta._problem import Problem
from jdelta._solver.chains import Chains
from jdelta._solver.director import OFFLOAD, RECOMPUTE, SAVE, Codes, Numbers
from jdelta._solver.frontier import Frontier, Gap, descending

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
        self.problem = problem
        self.chains = chains
        self.bytes = np.array([item.bytes for item in items], dtype=float)
        self.host = np.array([item.host_bytes for item in items], dtype=float)
        self.movable = np.array([item.offloadable for item in items], dtype=bool)
        self.out = np.array([item.seconds_out if item.offloadable else 0.0 for item in items])
        self.bare = np.array([item.seconds_exposed for item in items], dtype=float)
        self.into = np.array([item.seconds_in if item.offloadable else 0.0 for item in items])

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
        enter, leave = self._exposure(codes)
        gone, saved, moved = codes == RECOMPUTE, codes == SAVE, codes == OFFLOAD
        useful = (self.bytes > 0) & ~(gone & (chain == 0))
        # Hidden seconds that an offloaded item sets free are worth as many bytes as it has.
        freed = saved | (moved & (leave == 0))
        targets = (
            (RECOMPUTE, ~gone, -self.bytes * freed, chain - leave),
            (SAVE, gone | (leave > 0), self.bytes, -np.where(gone, chain, leave)),
            (OFFLOAD, self._room(codes) & (enter > 0), -self.bytes * saved, enter - chain * gone),
        )
        moves: list[_Move] = []
        for code, allowed, kept, seconds in targets:
            lost = seconds + price * kept
            for index in np.flatnonzero(useful & allowed & (codes != code) & (lost <= slack)):
                i = int(index)
                rank = float(lost[i] / self.bytes[i])
                moves.append(_Move(rank, float(kept[i]), float(seconds[i]), i, code))
        return moves

    def _room(self, codes: Codes) -> npt.NDArray[np.bool_]:
        """Which items may be offloaded, and find room on the host."""
        left = self.problem.host_capacity - float(self.host[codes == OFFLOAD].sum())
        return self.movable & (self.host <= left)

    def _exposure(self, codes: Codes) -> tuple[Numbers, Numbers]:
        """Exposed seconds that offloading each item would add, and that bringing it back saves."""
        moved = codes == OFFLOAD
        enter, leave = self.bare.copy(), self.bare * moved
        directions = ((self.out, self.problem.hidden_out), (self.into, self.problem.hidden_in))
        for seconds, hidden in directions:
            late = float(seconds[moved].sum()) - hidden
            enter += np.maximum(late + seconds, 0.0) - max(late, 0.0)
            leave[moved] += max(late, 0.0) - np.maximum(late - seconds[moved], 0.0)
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
