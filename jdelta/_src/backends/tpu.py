"""XLA for TPUs: what libtpu 0.0.50.1 (jax 0.12) makes of programs, and where that was seen."""

from __future__ import annotations

import importlib.util
import math
from types import MappingProxyType

from jax.experimental import topologies

from jdelta._src.backends.backend import (
    Backend,
    Devices,
    Fusion,
    Layout,
    Loops,
    Options,
    Passes,
    Reading,
    Spilling,
    Tolerances,
    Transfers,
    nothing_to_say,
)
from jdelta._src.backends.device_files import spare_libtpu_its_search
from jdelta._src.errors import TargetError
from jdelta._src.versions import installed_with


def _has_compiler() -> bool:
    """Where libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def _topology(chip: str, topology: str) -> topologies.TopologyDescription:
    """By libtpu, without a TPU."""
    if not _has_compiler():
        raise TargetError(f"TPU targets need libtpu: {installed_with('tpu')}")
    spare_libtpu_its_search()
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{topology}")


def _offload_options(memory: int, needed: int, outside_loops: bool, least: bool) -> Options:
    """Outside of loops: as much memory as the simulation says is needed, and no recompute by XLA.

    To hide transfers the scheduler takes what memory it sees, so it is told of as much as the
    simulation says is needed (a wish that it may exceed), or of none where the least memory is
    wanted. XLA's own rematerialisation takes the same figure for a limit and would recompute all it
    can (24 % more compute on an MLP, its peak the same), so it is off.
    """
    if not outside_loops:
        return {}
    return {
        "xla_tpu_user_reserved_hbm_bytes": str(max(0, memory - (0 if least else needed))),
        "xla_tpu_scheduler_percent_shared_memory_limit": "100",
        "xla_tpu_rematerialization_min_size_in_bytes": str(1 << 62),
    }


def _may_offload(jaxlib: tuple[int, ...]) -> None:
    """Nothing is refused."""
    del jaxlib


def _all_of_it() -> float:
    """All of it."""
    return 1.0


def _all_there_is(physical: int | None) -> int | None:
    """All that there is."""
    return physical


TPU = Backend(
    platform="tpu",
    layout=Layout(
        # Words: 8 rows; half-words and bytes are packed, so 16 and 32
        # (benchmarks/compilers/storage.py).
        tiles=MappingProxyType({1: (32, 128), 2: (16, 128), 4: (8, 128), 8: (8, 128)}),
        # Matrix products take bfloat16 at default precision (benchmarks/compilers/storage.py).
        narrows=True,
    ),
    fusion=Fusion(  # benchmarks/compilers/storage.py, accuracy/peaks.py; else it is named
        products_compute_inputs=True,
        gathers_compute_inputs=False,
        products_run_sums=True,
        merges_sums=True,
        softmax=True,
        longest_row=0,
        heavy=frozenset(),
        shares_what_is_heavy=False,
        scatters_rows=True,
        masks_groups=False,
        # By benchmarks/compilers/cycles.py threefry takes 126 to 148 instructions by itself; to
        # spare it in a GPT-2 is worth 100, by benchmarks/accuracy/prices.py.
        threefry_operations=100.0,
        split=None,
    ),
    loops=Loops(
        # A step of scanned layers took 2.14 million cycles with everything kept, 1.23 with
        # everything recomputed (ahead of time, v5e).
        writes_for_stacks=True,
        copies_into_stacks=False,
        products_copy_rows=False,
        relays_fetched=True,
        layers=(2, 3, 4),  # more would make larger programs for less and less
    ),
    transfers=Transfers(
        are_timed=True,
        # It undoes offload behind barriers, and runs copies to the host beside compute by itself.
        are_tied=False,
        # Forward passes of GPT-2, BERT and Llama as TPUs compile them take half to a third of what
        # they are priced at, and that adds up from copy to copy.
        slack=2.5,
        counts_instructions=False,
    ),
    passes=Passes(
        plain_region_inputs=False,
        # A mask is fused into the product beside it, and every constant that its bits are made with
        # is written as large as the mask: two layers of GPT-2 in bfloat16 took 13 GiB instead of 3
        # (benchmarks/compilers/recompute.py).
        written_bits=True,
        own_zeros=False,
    ),
    offload_options=_offload_options,
    reading=Reading(
        counts_on_chip=True,
        has_overlap=False,
        may_misorder_fetches=False,
        code_in_memory=True,  # a lot of it for unrolled models, next to none for scanned ones
    ),
    tolerances=Tolerances(
        lost=0.1,
        compiles_for_spill=0,
        judges_by_overlap=False,
        errs_in_parts=False,
        # A small step stays in on-chip memory (128 MiB), which no plan foretells. Floors of large
        # ones were 2.2 % (ViT-B, 2.1 GiB) and 0.5 % (scanned GPT-2, 2.6 GiB) below the prediction
        # after one plan (tpu:v5e, jax 0.10.2), and took as long to compile as the plan.
        large_floor=1 << 30,
        floor_far_above=math.inf,  # 257 MiB were 131 (jax 0.10.2): the same
        undoes_recompute=False,
    ),
    spilling=Spilling(by_callback=True, tries_handlers=False),
    devices=Devices(
        have_own_memory=True,
        memory_share=_all_of_it,
        memory_reason=nothing_to_say,
        pinned=_all_there_is,
        offload_refusal=_may_offload,
        topology=_topology,
        has_compiler=_has_compiler,
    ),
)
