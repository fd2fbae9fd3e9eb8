"""What one object says of a compiler and its devices: each habit that jdelta reckons with.

The habits themselves stand in ``tpu.py``, ``cuda.py`` and ``cpu.py``, with what shows each of them.
Everything else asks ``backend_of(platform)`` and compares no name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How values lie in memory.

    Attributes:
        tiles: Rows and columns of the tiles that the two minor dimensions are padded to, by bytes
            of an element: ``{4: (8, 128)}``. Empty where nothing is padded.
        narrows: Whether a float32 value that only matrix products read is stored as bfloat16.
    """

    tiles: Mapping[int, tuple[int, int]]
    narrows: bool


@dataclass(frozen=True)
class Fusion:
    """What becomes one kernel, and so is not written to memory.

    Attributes:
        products_compute_inputs: Whether matrix products compute element-wise inputs themselves.
        gathers_compute_inputs: Whether gathers do.
        products_run_sums: Whether reductions of what a matrix product makes run along with it.
        merges_sums: Whether several reductions of a value, and what makes it, are one kernel.
        softmax: Whether a product and the softmax of it are one kernel: exponentials are written,
            not scores. They are as narrow as the scores, unless these are masked in a wider type.
        longest_row: Elements of a row up to which a reduction of rows, and what reads the rows once
            more with its result, are one kernel: a softmax, or its derivative. 0 where none is.
        heavy: Primitives whose result is computed once, however many read it.
        shares_what_is_heavy: Whether what is made of heavy results is computed once too: the mask
            of a dropout.
        scatters_rows: Whether a scatter of one value to each row (the derivative of
            ``take_along_axis``) becomes a comparison with the index, done in every reader.
        masks_groups: Whether a ragged product multiplies all of its rows once for each group, with
            the rows of the others set to zero; else it is a kernel of its own.
        threefry_operations: Operations on integers that an element of random bits takes.
        split: How products with few tiles are split; None where they are not.
    """

    products_compute_inputs: bool
    gathers_compute_inputs: bool
    products_run_sums: bool
    merges_sums: bool
    softmax: bool
    longest_row: int
    heavy: frozenset[str]
    shares_what_is_heavy: bool
    scatters_rows: bool
    masks_groups: bool
    threefry_operations: float
    split: SplitProducts | None


@dataclass(frozen=True)
class SplitProducts:
    """Products with too few tiles to fill a device are split along the contracted dimension.

    Where that is no multiple of ``alignment``, both operands are copied, padded.

    Attributes:
        alignment: Elements that the contracted dimension should be a multiple of.
        tile: Rows and columns of a tile of the result.
        tiles: So many tiles fill the device.
    """

    alignment: int
    tile: int
    tiles: int


@dataclass(frozen=True)
class Loops:
    """What loops do beside what their bodies do.

    Attributes:
        writes_for_stacks: Whether loops write for stacks what would be computed in its readers
            otherwise.
        copies_into_stacks: Whether a stack is filled with zeros before its loop, and rows that
            products make, or that the iteration reads too, are copied to it.
        products_copy_rows: Whether matrix products read rows of stacks as copies made ahead, and
            make rows elsewhere, to be copied to their place.
        relays_fetched: Whether what an iteration fetches from the host for the next one comes as it
            was stored, and is copied to the layout that it is read in.
        layers: How many layers one iteration may be made to run, as a plan may choose.
    """

    writes_for_stacks: bool
    copies_into_stacks: bool
    products_copy_rows: bool
    relays_fetched: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Transfers:
    """When the compiler runs copies between device and host.

    Attributes:
        are_timed: Whether it leaves transfers exposed unless the program times them.
        are_tied: Whether copies have to be tied to other values, every forward loop writes late,
            and gradients of weights are tied even if nothing is offloaded.
        slack: Times its own seconds that a copy to the host is given.
        counts_instructions: Whether the compiler counts instructions to know how early a fetch has
            to start, so that the last one of an iteration must end before its many short ones.
    """

    are_timed: bool
    are_tied: bool
    slack: float
    counts_instructions: bool


@dataclass(frozen=True)
class Passes:
    """What is written into every program for this compiler.

    Attributes:
        plain_region_inputs: Whether what enters a region is kept without JAX's rounding.
        written_bits: Whether masks of random bits are written to memory before they are read.
        own_zeros: Whether gradients of pooled maxima are scattered into zeros of their own.
    """

    plain_region_inputs: bool
    written_bits: bool
    own_zeros: bool


Options = Mapping[str, str | bool]
"""Options of XLA for one program: ``{"xla_gpu_enable_latency_hiding_scheduler": True}``."""

OffloadOptions = Callable[[int, int, bool, bool], Options]
"""From the bytes of a device's memory, the bytes that a program needs there, whether the plan
offloads outside of loops, and whether the least memory is wanted, to the options."""


@dataclass(frozen=True)
class Reading:
    """What the figures of a compiled program mean.

    Attributes:
        counts_on_chip: Whether temporaries include what stays in on-chip memory, which a peak
            leaves out; of the bytes on the host those reported, and those in the text, the fewer
            count then.
        has_overlap: Whether the schedule of every program is read, not only of those that offload.
        may_misorder_fetches: Whether the order in which a loop fetches has to be looked at.
        code_in_memory: Whether the program's own code lies in device memory beside the peak.
    """

    counts_on_chip: bool
    has_overlap: bool
    may_misorder_fetches: bool
    code_in_memory: bool


@dataclass(frozen=True)
class Tolerances:
    """How far the search trusts the simulation.

    Attributes:
        lost: Part of the budget by which a plan may exceed it before the floor is compiled next.
        compiles_for_spill: Compiles more where a plan may spill.
        judges_by_overlap: Whether a plan with several layers in an iteration is judged by the
            overlap that was read in its program.
        errs_in_parts: Whether the simulation of a plan is off by the same part as that of the plain
            step; else by as many bytes as that of other plans.
        large_floor: Bytes from which on the floor is believed without being compiled, if plans took
            what was predicted; a smaller one only after some programs (``search/rules.py``).
        floor_far_above: Times the budget from which on the floor is believed to exceed it without
            being compiled.
        undoes_recompute: Whether released versions undo recompute outside of loops, which an error
            says then.
    """

    lost: float
    compiles_for_spill: int
    judges_by_overlap: bool
    errs_in_parts: bool
    large_floor: float
    floor_far_above: float
    undoes_recompute: bool


@dataclass(frozen=True)
class Spilling:
    """How programs reach a store.

    Attributes:
        by_callback: Whether they call their host; else they have handlers.
        tries_handlers: Whether the handlers are tried on the devices at hand first.
    """

    by_callback: bool
    tries_handlers: bool


def nothing_to_say() -> str:
    """Nothing to say."""
    return ""


@dataclass(frozen=True)
class Devices:
    """The devices of a platform.

    Attributes:
        have_own_memory: Whether their memory is not the host's.
        memory_share: The part of their memory that JAX takes, as the environment says.
        memory_reason: Why that is not all of it, and how to say otherwise, in a sentence; empty
            where there is nothing to say.
        pinned: From the bytes of a machine's memory (None where it is not known) to those that a
            process can pin on it; None where that is not known, or nothing is pinned.
        offload_refusal: From the version of jaxlib, as ``(0, 11, 1)``, to why nothing may be
            offloaded; None where it may.
        topology: From a chip and a topology to their description by the compiler; None where there
            is no compiler for devices that are not here.
        has_compiler: Whether what compiles for them is installed; it is not loaded to know.
    """

    have_own_memory: bool
    memory_share: Callable[[], float]
    memory_reason: Callable[[], str]
    pinned: Callable[[int | None], int | None]
    offload_refusal: Callable[[tuple[int, ...]], str | None]
    topology: Callable[[str, str], Any] | None
    has_compiler: Callable[[], bool]


@dataclass(frozen=True)
class Backend:
    """One compiler and its devices.

    Attributes:
        platform: JAX's name: ``"tpu"``.
        layout: How values lie in memory.
        fusion: What becomes one kernel.
        loops: What loops do beside what their bodies do.
        transfers: When copies between device and host run.
        passes: What is written into every program.
        offload_options: Options of XLA for programs that offload.
        reading: What the figures of a compiled program mean.
        tolerances: How far the search trusts the simulation.
        spilling: How programs reach a store.
        devices: Memory, and compilers for devices that are not here.
    """

    platform: str
    layout: Layout
    fusion: Fusion
    loops: Loops
    transfers: Transfers
    passes: Passes
    offload_options: OffloadOptions
    reading: Reading
    tolerances: Tolerances
    spilling: Spilling
    devices: Devices
