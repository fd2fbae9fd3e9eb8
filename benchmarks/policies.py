"""What people do by hand: JAX's ready-made recompute policies, MaxText's sets of names, root L.

MaxText's sets are those of `get_remat_policy` in its `nnx_decoders.py` (maxtext 0.2.5), over the
names that its layers give to their values; benchmark models carry the same names at the same
places.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks import cases, models, steps
from benchmarks.models import Case

ready = jax.checkpoint_policies

QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")


@dataclass(frozen=True)
class HandPolicy:
    """One way to recompute or offload, applied to every block.

    Attributes:
        policy: Makes the policy of `jax.checkpoint`.
        names: Names that it goes by; it suits models that carry one of them.
        offloads: Whether it moves values to host memory, which works under a scan only.
        spans: Whether it also recomputes groups of blocks, root of L in each.
    """

    policy: Callable[[], Any]
    names: tuple[str, ...] = ()
    offloads: bool = False
    spans: bool = False


def saving(*names: str) -> HandPolicy:
    """Saves the values of these names, recomputes the rest."""
    return HandPolicy(lambda: ready.save_only_these_names(*names), names)


def offloading(*names: str) -> HandPolicy:
    """Offloads the values of these names, recomputes the rest."""
    return HandPolicy(lambda: _offload(names), names, offloads=True)


def _offload(names: Sequence[str]) -> Any:
    return ready.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


POLICIES = {
    "nothing_saveable": HandPolicy(lambda: ready.nothing_saveable),
    "sqrt": HandPolicy(lambda: ready.nothing_saveable, spans=True),
    "dots_saveable": HandPolicy(lambda: ready.dots_saveable),
    "dots_with_no_batch_dims_saveable": HandPolicy(lambda: ready.dots_with_no_batch_dims_saveable),
    "offload_dot_with_no_batch_dims": HandPolicy(
        lambda: ready.offload_dot_with_no_batch_dims("device", "pinned_host"), offloads=True
    ),
    "maxtext:full": HandPolicy(lambda: None),
    "maxtext:save_out_proj": saving("out_proj"),
    "maxtext:save_qkv_proj": saving(*QKV),
    "maxtext:save_dot_except_mlp": saving(*QKV, "out_proj"),
    "maxtext:minimal": saving(*QKV, "out_proj", *MLP),
    "maxtext:qkv_proj_offloaded": offloading("query_proj", "key_proj", "value_proj"),
    "maxtext:minimal_offloaded": offloading(*QKV, "out_proj", *MLP),
}


def refusal(policy: str, step: str, names: set[str], offload_refusal: str | None) -> str | None:
    """Why a policy is not for a step; None if it is.

    Args:
        policy: A key of `POLICIES`.
        step: A key of `steps.STEPS`.
        names: Names that the step's values carry.
        offload_refusal: Why the target cannot offload; None if it can.
    """
    hand, options = POLICIES[policy], steps.STEPS[step]
    config = models.find(options["name"])
    if hand.spans and not (options.get("scan") and hasattr(config, "span")):
        return "no scan of scans"
    if hand.names and not names.intersection(hand.names):
        return "no values of these names"
    if hand.offloads and not options.get("scan"):
        return "no scan to offload from"
    return offload_refusal if hand.offloads else None


@functools.cache
def plain(step: str, target: str, **options: Any) -> cases.Program:
    """The step as it is; arguments are those of `program`."""
    return cases.traced(steps.build(step, **options), target)


def program(policy: str, step: str, target: str, **options: Any) -> cases.Program | str:
    """The step under a policy; or why the policy is not for the step.

    Args:
        policy: A key of `POLICIES`.
        step: A key of `steps.STEPS`.
        target: Where to compile for.
        **options: Arguments of `models.build` in place of the step's own.
    """
    known = plain(step, target, **options)
    why = refusal(policy, step, known.names(), known.target.offload_refusal)
    return why or cases.traced(build(policy, step, **options), target)


def variant(name: str, step: str, target: str, **options: Any) -> cases.Program | str:
    """The plain step (`"plain"`), or the one under a policy; or why the policy is not for it."""
    if name == "plain":
        return plain(step, target, **options)
    return program(name, step, target, **options)


def same_peak(program: cases.Program) -> int:
    """A budget that is a program's peak: buffers of some bytes, which XLA adds or not, left aside.

    GPT-2 with everything recomputed takes 256 bytes more or less on a GPU by who emits it. It is no
    more than the target has.
    """
    peak = program.measured.peak
    return min(peak + peak // 10_000, program.target.memory)


def build(policy: str, step: str, **options: Any) -> Case:
    """The step under a policy.

    Args:
        policy: A key of `POLICIES`.
        step: A key of `steps.STEPS`.
        **options: Arguments of `models.build` in place of the step's own.
    """
    hand = POLICIES[policy]
    if hand.spans:
        options["span"] = root(models.find(steps.STEPS[step]["name"]).layers)
    remat = steps.checkpointed(step, policy=hand.policy())
    return steps.build(step, remat=remat, **options)


def root(layers: int) -> int:
    """The largest divisor of the number of layers that is no larger than its root."""
    return max(d for d in range(1, math.isqrt(layers) + 1) if layers % d == 0)
