"""A plan in the words of other libraries: names of values to save and to offload.

They decide by ``checkpoint_name``, one decision for all layers, so a plan can be said in their
words as far as its values have names of the user's own, decided alike in all regions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jdelta._src.decision import Decision
from jdelta._src.errors import ArgumentError, PlanMismatchError
from jdelta._src.plan.record import PlanRecord
from jdelta._src.report.rows import rows, shown
from jdelta._src.residuals.residual import Residual
from jdelta._src.sizes import format_bytes

_MAXTEXT = (
    "context query_proj key_proj value_proj qkv_proj out_proj mlpwi mlpwi_0 mlpwi_1 mlpwo"
).split()
"""Names that MaxText's ``remat_policy: custom`` has a setting for, beside its layers' input."""

_MAXTEXT_RARE = (
    "kv_proj query_wa_proj kv_wa_proj mla_q mla_kv attention_out indexer_cutoff_threshold "
    "moe_mlpwi_0 moe_mlpwi_1 moe_mlpwo moe_x_sorted moe_routing_maps"
).split()
"""Further ones, which older versions refuse: written only where the model has such values.

Both as in the package ``maxtext`` 0.2.5: ``RematAndOffload`` in its ``configs/types.py``.
"""


@dataclass(frozen=True)
class _Names:
    """A plan by the user's own names.

    Attributes:
        decisions: From each name to its decision.
        unnamed: Residuals without such a name that the plan keeps.
        entering: What becomes of what enters the regions.
    """

    decisions: Mapping[str, Decision]
    unnamed: Sequence[Residual]
    entering: Decision

    def of(self, decision: Decision) -> list[str]:
        return sorted(name for name, d in self.decisions.items() if d is decision)


def export(plan: PlanRecord, form: str) -> str:
    """Write a plan in the words of another library.

    Args:
        plan: The plan.
        form: ``"jax"`` (a call of ``jax.checkpoint_policies``), ``"maxtext"`` (YAML settings of
            ``remat_policy: custom``), ``"levanter"`` (YAML of ``gradient_checkpointing``) or
            ``"axlearn"`` (a ``RematSpec``).

    Returns:
        Text. What the plan keeps but has no name of the user's own is listed in comments: there it
        will be computed again.

    Raises:
        ArgumentError: No such form.
        PlanMismatchError: The plan decides differently about values of one name, keeps nothing
            that has a name, spills, nests checkpoints, or has names that the form does not know.
    """
    if form not in FORMS:
        raise ArgumentError(f"form must be one of {sorted(FORMS)}; got {form!r}")
    if plan.figures.spill_bytes:
        raise PlanMismatchError(
            "The plan spills to files, which no policy of others can: plan without spill=."
        )
    if plan.answer.nesting:
        raise PlanMismatchError(
            f"The plan {plan.answer.nesting}, which no policy of others can: plan with a larger "
            "budget."
        )
    names = _names(plan)
    if not names.decisions and names.unnamed:
        raise PlanMismatchError(
            "Nothing that the plan keeps has a name: mark values of the model with "
            "jax.ad_checkpoint.checkpoint_name and plan again."
        )
    return "\n".join([*_comments(names), FORMS[form](names)])


def _names(plan: PlanRecord) -> _Names:
    residuals, planned = plan.answer.residuals, plan.decisions
    decisions: dict[str, Decision] = {}
    for r in residuals:
        user_name = r.user_name if r.label == r.name else ""  # else given where no policy is asked
        decision = planned[r.name]
        if user_name and decisions.setdefault(user_name, decision) is not decision:
            raise PlanMismatchError(
                f"The plan decides differently about values called {user_name!r}: "
                f"{decisions[user_name].value} and {decision.value}. Others decide once for all "
                f"layers: pin them (pin={{{user_name!r}: ...}}) and plan again."
            )
    unnamed = [
        r
        for r in residuals
        if not (r.user_name or r.region_input) and planned[r.name] is not Decision.RECOMPUTE
    ]
    entering = {planned[r.name] for r in residuals if r.region_input} - {_RECOMPUTE}
    return _Names(decisions, unnamed, min(entering, key=list(Decision).index, default=_SAVE))


_SAVE, _OFFLOAD, _RECOMPUTE = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE


def _comments(names: _Names) -> list[str]:
    if not names.unnamed:
        return []
    size = format_bytes(sum(r.bytes for r in names.unnamed))
    saved = dict.fromkeys((r.name for r in names.unnamed), _SAVE)
    visible, rest = shown(rows(names.unnamed, saved))
    listed = [*(f"{row.name} ({format_bytes(row.bytes)})" for row in visible), rest]
    return [
        f"# Kept by the plan, but without a name of its own, so computed again here ({size}):",
        *(f"#   {line}" for line in listed if line),
    ]


def _jax(names: _Names) -> str:
    return (
        "jax.checkpoint_policies.save_and_offload_only_these_names(\n"
        f"    names_which_can_be_saved={names.of(_SAVE)},\n"
        f"    names_which_can_be_offloaded={names.of(_OFFLOAD)},\n"
        '    offload_src="device",\n'
        '    offload_dst="pinned_host",\n'
        ")"
    )


def _maxtext(names: _Names) -> str:
    known = {*_MAXTEXT, *_MAXTEXT_RARE, "decoder_layer_input"}
    other = [n for d in (_SAVE, _OFFLOAD) for n in names.of(d) if n not in known]
    if other:
        raise PlanMismatchError(
            f"MaxText has no setting for {', '.join(other)}; it knows {', '.join(sorted(known))}."
        )
    words = {_SAVE: "device", _OFFLOAD: "offload", _RECOMPUTE: "remat"}
    layer = names.decisions.get("decoder_layer_input", _RECOMPUTE)
    said = {
        "decoder_layer_input": names.entering if layer is _RECOMPUTE else layer,  # never "remat"
        **dict.fromkeys(_MAXTEXT, _RECOMPUTE),
        **{n: d for n, d in names.decisions.items() if n in {*_MAXTEXT, *_MAXTEXT_RARE}},
    }
    settings = (f"{name}: '{words[d]}'" for name, d in said.items())
    return "\n".join(["remat_policy: custom", *settings])


def _levanter(names: _Names) -> str:
    carries = '"offload"' if names.entering is _OFFLOAD else "true"
    return "\n".join(
        [
            "gradient_checkpointing:",
            f"  save_carries: {carries}",
            "  save_inputs: false",
            f"  save_block_internals: {_yaml(names.of(_SAVE))}",
            f"  offload_block_internals: {_yaml(names.of(_OFFLOAD))}",
        ]
    )


def _yaml(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _axlearn(names: _Names) -> str:
    return (
        "RematSpec(\n"
        "    prevent_cse=False,\n"
        "    policy=config_for_function(save_and_offload_only_these_names_regex).set(\n"
        f"        names_which_can_be_saved={_pattern(names.of(_SAVE))},\n"
        f"        names_which_can_be_offloaded={_pattern(names.of(_OFFLOAD))},\n"
        '        offload_src="device",\n'
        '        offload_dst="pinned_host",\n'
        "    ),\n"
        ")"
    )


def _pattern(names: Sequence[str]) -> str:
    return repr("|".join(map(re.escape, names))) if names else "None"


FORMS: Mapping[str, Callable[[_Names], str]] = {
    "jax": _jax,
    "maxtext": _maxtext,
    "levanter": _levanter,
    "axlearn": _axlearn,
}
"""From the name of each form to what writes it."""
