"""What does it spare to update weights inside the backward loop? Compiled peaks, both ways.

Scanned models under JAX's own recompute of every layer, so that gradients and not activations make
the peak, with Adam and no clipping: a global norm needs all gradients at once. Nothing is run.
`reorder=True` uses it where the compiled peak is lower for it.

    python -m benchmarks run updates --target cuda:h100
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from benchmarks import study
from benchmarks.models import build, checkpoint
from benchmarks.order.order import training
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.measure import measure
from jdelta._src.passes.emit import Step, emit

_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 1, "dropout": 0.0},
    "gpt2-large": {"batch": 1, "dropout": 0.0},
    "llama": {"batch": 1},
    "vit-l": {"batch": 8, "dropout": 0.0},
    "bert-large": {"batch": 1, "dropout": 0.0},
    "t5-large": {"batch": 1, "dropout": 0.0},
    "gpt2-xl": {"batch": 1, "dropout": 0.0},
    "mixtral": {"batch": 1},
}
STEPS: dict[str, dict[str, Any]] = {
    f"{name} batch {options['batch']} scanned, Adam": {"name": name, **options}
    for name, options in _MODELS.items()
}
TARGETS = ("cuda:h100", "tpu:v5e:2x2")
LARGE = {(f"{name} batch 1 scanned, Adam", "tpu:v5e:2x2") for name in ("gpt2-xl", "mixtral")}
"""What a device of that target has no memory for; compiled for a larger one."""

LARGER = "tpu:v5p:2x2x1"
LOOPS = ("h", "encoder", "decoder")
"""Keys of weights that a loop over layers runs through."""

HEADS = [
    *("step", "target", "arguments", "peak", "in the loop", "less", "reorder=True"),
    "gradients in loops",
]


def row(step: str, target: str) -> Row:
    """Compiles one step both ways."""
    by_hand = checkpoint(STEPS[step]["name"], prevent_cse=False)
    case = build(remat=by_hand, scan=True, **STEPS[step])
    train, args = training(case, optax.adam(1e-3))
    where = resolve(target)
    args = where.abstract(args)
    figures: Row = {}
    for way in (False, True):
        emission = emit(Step(train, args, (0,), where, {}, updates_in_loops=way), None)
        measured = measure(emission.lower(), where, emission.options)[1]
        figures |= {"in_loop" if way else "peak": measured.peak, "arguments": measured.arguments}
    stacked = [case.state.params.get(key, {}) for key in LOOPS]
    bytes_stacked = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stacked))
    return {**figures, "stacked": bytes_stacked}


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    sizes = [mib(r[name]) for name in ("arguments", "peak", "in_loop")]
    spared = share(r["peak"] - r["in_loop"], r["peak"])
    used = "used" if r["in_loop"] < r["peak"] else "not used"
    return [r["step"], r["target"], *sizes, spared, used, mib(r["stacked"])]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(step: Sequence[str] = tuple(STEPS), target: Sequence[str] = TARGETS) -> list[Job]:
    """What is too large for a device of its target is compiled for a larger one."""
    return [Job(s, {"target": LARGER if (s, t) in LARGE else t}) for t in target for s in step]


STUDY = Study(
    "updates",
    "What does it spare to update weights inside the backward loop?",
    jobs,
    row,
    tables,
)
