"""XLA for NVIDIA's GPUs: what the CUDA 13 plug-in 0.12 makes of programs, and where it was seen."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
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
    SplitProducts,
    Tolerances,
    Transfers,
)
from jdelta._src.backends.chips import CHIPS
from jdelta._src.backends.device_files import GPUS, present
from jdelta._src.errors import TargetError
from jdelta._src.versions import installed_with

_NOT_HERE = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
"""The plug-in refuses to register without a driver; its compiler reports every program larger than
the device as an error on stderr."""

_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_POOL_GIB = 64  # XLA's pool of pinned host memory, unless the variable says otherwise

_SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_SHARE = 0.75  # of a GPU's memory is what JAX takes, unless a variable says otherwise

_LOADS_IN_ORDER = (0, 11, 1)  # the first jaxlib that reads offloaded stacks in the right order


def _plugins() -> list[importlib.metadata.EntryPoint]:
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return [plugin for plugin in plugins if plugin.name.startswith("xla_cuda")]


def _has_compiler() -> bool:
    """Where JAX's CUDA plug-in is installed."""
    return bool(_plugins())


def _topology(chip: str, topology: str) -> topologies.TopologyDescription:
    """By JAX's CUDA plug-in, without a GPU."""
    plugins = _plugins()
    if not plugins:
        raise TargetError(f"CUDA targets need JAX's CUDA plug-in: {installed_with('cuda')}")
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=CHIPS["cuda"][chip].description,
        topology=topology,
    )
    with _environment({} if present(*GPUS) else _NOT_HERE):
        try:
            return describe()
        except NotImplementedError:
            # JAX looked for plug-ins before, when this one still asked for a driver.
            plugins[0].load().initialize()
            return describe()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None, None, None]:
    """Sets environment variables for as long as a library loads."""
    before = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


def _memory_share() -> float:
    """Three quarters, unless ``XLA_CLIENT_MEM_FRACTION`` says otherwise."""
    return float(os.environ.get(_share_variable(), _SHARE))


def _share_variable() -> str:
    """The variable that says how much of a GPU's memory JAX takes; empty where none does."""
    return next(filter(os.environ.get, _SHARE_VARIABLES), "")


def _memory_reason() -> str:
    """Whose choice the share of the memory is."""
    share, variable = f"{_memory_share():.0%}", _share_variable()
    if variable:
        return f"JAX takes {share} of a GPU's memory, as {variable} says."
    return (
        f"JAX takes {share} of a GPU's memory unless {_SHARE_VARIABLES[-1]} says otherwise: with "
        f"{_SHARE_VARIABLES[-1]}=0.9, for jdelta and for the training, it takes 90%."
    )


def _pinned(physical: int | None) -> int:
    """64 GiB, unless ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`` says otherwise, and what there is."""
    pool = int(os.environ.get(_POOL_VARIABLE, _POOL_GIB)) * 2**30
    return pool if physical is None else min(pool, physical)


def _offload_refusal(jaxlib: tuple[int, ...]) -> str | None:
    """Before jaxlib 0.11.1 offloaded stacks are read in the wrong order.

    To be deleted when jdelta asks for a jaxlib that reads them in order.
    """
    if jaxlib >= _LOADS_IN_ORDER:
        return None
    return (
        f"jaxlib {'.'.join(map(str, jaxlib))} reads offloaded scan residuals back in the wrong "
        "order on GPUs (openxla/xla pull requests 46231 and 46308); upgrade to jaxlib 0.11.1 or "
        "newer"
    )


def _offload_options(memory: int, needed: int, outside_loops: bool, least: bool) -> Options:
    """Transfers are scheduled to hide behind compute, and nothing is captured in a CUDA graph.

    XLA runs transfers beside compute by itself on an H100, but not on an A100. There each would end
    where it starts (``benchmarks/compilers/offload.py``: nothing hidden, else 64 to 100 %). What it
    captures in a CUDA graph runs one after the other, whatever the schedule says (openxla/xla pull
    requests 48900 and 49158), so nothing is captured (``benchmarks/device/turns.py``, in a loop on
    an H200: with graphs 5 % of the transfers hidden, without 67 %).
    """
    del memory, needed, outside_loops, least
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_command_buffer": "",
    }


CUDA = Backend(
    platform="cuda",
    layout=Layout(tiles=MappingProxyType({}), narrows=False),
    fusion=Fusion(  # benchmarks/compilers/storage.py, accuracy/peaks.py; else it is named
        products_compute_inputs=False,
        gathers_compute_inputs=True,
        products_run_sums=False,
        merges_sums=True,
        softmax=False,
        # With 16384 the gradient of scores has memory of its own, with 32768 it is written over
        # them (benchmarks/compilers/storage.py).
        longest_row=16384,
        heavy=frozenset({"erf", "erfc", "erf_inv"}),  # they become dozens of instructions
        shares_what_is_heavy=True,
        scatters_rows=False,
        masks_groups=True,
        # 79 instructions, as a GPU rotates in one (benchmarks/compilers/cycles.py).
        threefry_operations=80.0,
        # 126 tiles are split, 132 are not; what 8 divides is copied, what 16 divides is not
        # (benchmarks/compilers/storage.py).
        split=SplitProducts(alignment=16, tile=128, tiles=128),
    ),
    loops=Loops(
        writes_for_stacks=True,
        copies_into_stacks=True,
        products_copy_rows=True,
        relays_fetched=False,
        layers=(2, 3, 4),  # more would make larger programs for less and less
    ),
    transfers=Transfers(
        are_timed=True,
        # Left alone, it puts off the gradients of all layers in some plans of an unrolled GPT-2,
        # and those of the head over the whole backward loop: 10 % of their temporaries
        # (benchmarks/compilers/recompute.py).
        are_tied=True,
        slack=1.5,  # roofline seconds are not that exact
        counts_instructions=True,
    ),
    passes=Passes(
        plain_region_inputs=False,
        written_bits=False,
        # Else a relu of that shape shares them, and they stay for the whole step
        # (tests/passes/test_pooled_gradients.py; the U-Net of benchmarks/plans/savings.py).
        own_zeros=True,
    ),
    offload_options=_offload_options,
    reading=Reading(
        counts_on_chip=False, has_overlap=True, may_misorder_fetches=True, code_in_memory=False
    ),
    tolerances=Tolerances(
        lost=0.1,
        compiles_for_spill=0,
        judges_by_overlap=True,
        errs_in_parts=False,
        # Of eight steps of the zoo (jax 0.12.0.1) the floor was then within 9 % of the compiled one
        # for seven; layers.batch_norm's was 18 % too low.
        large_floor=0,
        floor_far_above=1.2,  # at most 9 % too high (ResNet-50), see ``search/history.py``
        undoes_recompute=False,
    ),
    spilling=Spilling(by_callback=False, tries_handlers=True),
    devices=Devices(
        have_own_memory=True,
        memory_share=_memory_share,
        memory_reason=_memory_reason,
        pinned=_pinned,
        offload_refusal=_offload_refusal,
        topology=_topology,
        has_compiler=_has_compiler,
    ),
)
