"""A set of decisions as a ``jax.checkpoint`` policy over names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jdelta._src import _jax
from jdelta._src.backends.backend import Backend
from jdelta._src.decision import Decision
from jdelta._src.errors import PlanMismatchError
from jdelta._src.program.names import RegionName
from jdelta._src.sizes import format_some

_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Policy:
    """What ``jax.checkpoint`` is told about each named value.

    Equal policies are one policy to JAX's caches, a changed one is traced anew. (No ``slots``:
    JAX keeps weak references to policies.)

    Attributes:
        saved: Names kept on the device.
        offloaded: Names copied to pinned host memory and back.
        spilled: Names written to files and read back. To ``jax.checkpoint`` they are offloaded; the
            step is then evaluated once more: see ``passes/spill.py``.
        recomputed: Names dropped; a value without any decision is dropped too.
        regions: From each region that the decisions are for to the number of loops around it.
        writes_bits: Whether random bits are written to memory before they are read: TPUs need it.
        least: Whether the least memory matters more than hiding transfers. Where there are none the
            program is the one that ``jax.checkpoint`` by hand makes: see ``is_by_hand``.
        partly: Those regions of which some inexact argument is not differentiated.
        together: Those regions that run several times in an iteration of a loop.
        levels: From the name of each value that enters a region and is dropped to its level. The
            backward part of a region computes such a value again if that is not held, and holds,
            of what it makes on the way, what has no larger level than all that is made after it.
    """

    saved: frozenset[str]
    offloaded: frozenset[str]
    recomputed: frozenset[str]
    regions: tuple[tuple[str, int], ...]
    writes_bits: bool = False
    least: bool = False
    partly: frozenset[str] = frozenset()
    spilled: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()
    levels: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        """The policy in a line."""
        counts = {
            "saved": self.saved,
            "offloaded": self.offloaded,
            "spilled": self.spilled,
            "recomputed": self.recomputed,
        }
        parts = [f"{len(names)} {what}" for what, names in counts.items() if names]
        return f"<jdelta policy: {', '.join(parts) or 'nothing decided'}>"

    @classmethod
    def of(
        cls,
        decisions: Mapping[str, Decision],
        regions: Mapping[str, int],
        backend: Backend,
        *,
        least: bool = False,
        partly: frozenset[str] = frozenset(),
        together: frozenset[str] = frozenset(),
    ) -> Policy:
        """The policy of decisions by name.

        Args:
            decisions: From names to decisions.
            regions: From the regions that they are for to the number of loops around each.
            backend: Compiler and devices of the target.
            least: Whether the least memory matters more than hiding transfers.
            partly: Those regions of which some inexact argument is not differentiated.
            together: Those regions that run several times in an iteration of a loop.
        """
        names = {d: frozenset(n for n, is_d in decisions.items() if is_d is d) for d in Decision}
        policy = cls(
            names[Decision.SAVE],
            names[Decision.OFFLOAD],
            names[Decision.RECOMPUTE],
            tuple(sorted(regions.items())),
            least=least,
            partly=partly,
            spilled=names[Decision.SPILL],
            together=together,
        )
        written = backend.passes.written_bits
        return replace(policy, writes_bits=written and not policy.is_by_hand)

    def dropping(self, levels: Mapping[str, int]) -> Policy:
        """The policy that drops some of what enters regions, too; see ``levels``."""
        return replace(
            self,
            saved=self.saved.difference(levels),
            recomputed=self.recomputed.union(levels),
            levels=tuple(sorted(levels.items())),
        )

    def __call__(self, prim: Any, /, *avals: Any, **params: Any) -> Any:
        """What to do with the results of an equation: the protocol of ``jax.checkpoint``.

        Calls of ``jax.debug`` have none. Those not "saved" run in the backward pass too, for which
        JAX (to 0.12) forgets to keep what they read, where it is not computed again.
        """
        name = params.get("name")
        if not isinstance(name, RegionName):
            return prim.name in _jax.DEBUG
        return self._by_name(prim, *avals, **{**params, "name": self._known(name)})

    def decision(self, name: str, entering: str | None = None) -> Decision:
        """The decision for a residual of the plan.

        Args:
            name: Its name.
            entering: The name by which it enters another region, if it does. By hand it stays by
                that name only: the region that makes it computes it again.
        """
        name = entering if entering and self.is_by_hand else name
        for decision, names in self._sets.items():
            if name in names:
                return decision
        return Decision.RECOMPUTE

    def spills(self, name: RegionName) -> bool:
        """Whether the value of a traced name is spilled."""
        return bool(self.spilled) and self._known(name) in self.spilled

    @property
    def kept(self) -> frozenset[str]:
        """Names of all values that are not computed again."""
        return self.saved | self.offloaded | self.spilled

    @property
    def _sets(self) -> Mapping[Decision, frozenset[str]]:
        return {
            Decision.SAVE: self.saved,
            Decision.OFFLOAD: self.offloaded,
            Decision.SPILL: self.spilled,
        }

    @property
    def offloads_outside_loops(self) -> bool:
        """Whether a value that comes once in a step is offloaded."""
        loops = dict(self.regions)
        return any(loops.get(region, 0) == 0 for region in map(self._region, self.offloaded))

    @property
    def is_by_hand(self) -> bool:
        """Whether the program is the one of ``jax.checkpoint`` by hand, with these decisions.

        Recompute is shielded from CSE in loops too, random bits are not written to memory, and
        gradients of weights are not tied to what follows. Each of that takes less memory in some
        programs, and more in others (MiB on a v5e, by hand first: a scanned Runge-Kutta step 88 and
        97, unrolled layers with dropout 41 and 68, with noise that scales values 314 and 570).
        """
        return self.least and not self.offloaded and not self.spilled

    @property
    def may_differ_from_by_hand(self) -> bool:
        """Whether shields or random bits may make another program than ``jax.checkpoint`` does."""
        return self.writes_bits or any(loops for _, loops in self.regions)

    def prevents_cse(self, region: str) -> bool:
        """Whether recompute in ``region`` must be shielded from CSE.

        True outside of loops, and where it runs several times in an iteration: there nothing else
        makes the recompute of the second wait for the gradients of the first.
        """
        is_in_a_loop = dict(self.regions).get(region, 0) > 0
        return self.is_by_hand or region in self.together or not is_in_a_loop

    def check_before_jvp(self, region: str) -> None:
        """Refuse to decide about a region of which only the plan knows what is differentiated.

        Values are named after JVP in what is differentiated; with ``jax_remat3`` on, a
        ``jax.checkpoint`` asks before, when that is taken to be every inexact argument.

        Raises:
            PlanMismatchError: Other values than the planned ones might have their names.
        """
        calls = {region} & self._region_names or self._unnumbered.get(region, set())
        if calls & self.partly:
            raise PlanMismatchError(
                f"Not every real argument of {region!r} is differentiated in the planned step, and "
                "jax.checkpoint with jax_remat3 on asks its policy before that is known. Use "
                "plan.jit, jdelta.jit or jdelta.remat(policy=…) in its place, or turn jax_remat3 "
                "off."
            )

    def check_reaches(self, block: str) -> None:
        """Refuse to be the policy of a ``jax.checkpoint`` in which no region is.

        A policy that drops everything does as well there.

        Args:
            block: What is in it, for messages.

        Raises:
            PlanMismatchError: All that the plan keeps would be dropped.
        """
        if self.kept:
            raise PlanMismatchError(
                f"The plan keeps {len(self.kept)} values ({format_some(sorted(self.kept), 3)}), "
                f"but the jax.checkpoint around {block} has none of them: nothing in it is marked "
                "with jdelta.remat, so all of it would be recomputed. Mark the block in the step "
                "that is planned (and plan with per_layer=False where it is under a scan), then "
                "give it the plan: jdelta.remat(Block, policy=plan), or nn.remat(jdelta.remat("
                "Block), policy=plan). Without marks, run the planned step: plan.jit()."
            )

    @functools.cached_property
    def _by_name(self) -> Any:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(self.saved),
            names_which_can_be_offloaded=sorted(self.offloaded | self.spilled),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def _region(self, name: str) -> str:
        """The region that a value is in; regions' names have slashes too."""
        parts = name.split("/")
        heads = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((head for head in heads if head in self._region_names), name)

    @functools.cached_property
    def _region_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.regions)

    @functools.cached_property
    def _unnumbered(self) -> dict[str, set[str]]:
        """From a region's name without call number to the planned regions it may stand for."""
        calls: dict[str, set[str]] = {}
        for name in self._region_names:
            calls.setdefault(_NUMBER.sub("", name), set()).add(name)
        return calls

    def _known(self, name: RegionName) -> str:
        """The planned name that a traced one stands for.

        Outside of ``Plan.jit`` calls of a function are not counted, so that ``block_0`` and
        ``block_1`` of the plan are both called ``block``: right only if they decide alike.
        """
        if name.region in self._region_names:
            return name
        calls = self._unnumbered.get(name.region)
        if not calls:
            raise PlanMismatchError(
                f"The plan knows no region {name.region!r}; it was made for "
                f"{', '.join(sorted(self._region_names)[:8])}. Plan the step that this model is "
                "part of, or give the region the name it had with jdelta.remat(name=…)."
            )
        inner = name.removeprefix(name.region)
        planned = {self.decision(call + inner) for call in calls}
        if name.is_input and planned > {Decision.RECOMPUTE}:  # an argument of the step in some
            calls = {c for c in calls if self.decision(c + inner) is not Decision.RECOMPUTE}
            planned -= {Decision.RECOMPUTE}
        if len(planned) > 1:
            raise PlanMismatchError(
                f"The plan decides differently for {sorted(call + inner for call in calls)[:3]}…, "
                f"and a policy alone cannot tell the calls of {name.region!r} apart. Use plan.jit "
                "or jdelta.jit, or name each call: jdelta.remat(block, name=f'block_{i}'); for "
                "layers of a scan plan with per_layer=False."
            )
        return min(calls) + inner
