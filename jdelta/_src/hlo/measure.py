"""What the compiler says a program takes."""

import contextlib
import dataclasses
import os
import platform
import re
import time
from collections.abc import Mapping
from typing import Any, get_origin

import jax

from jdelta._src import _jax, cache
from jdelta._src.backends.backend import Reading
from jdelta._src.backends.target import Target
from jdelta._src.hlo.fetch_order import forward_fetches
from jdelta._src.hlo.host_buffers import buffers
from jdelta._src.hlo.overlap import NO_TRANSFERS, Overlap, read_overlap
from jdelta._src.hlo.spill_calls import file_calls
from jdelta._src.hlo.text import parse
from jdelta._src.program.hlo_names import NOTHING, Computed
from jdelta._src.spill.library import WRITE
from jdelta._src.versions import COMPILERS, version

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSAL = re.compile(
    r"RESOURCE_EXHAUSTED.*?"
    r"(?:memory required for HLO temporaries \(|memory space hbm\. Used )"
    r"(?P<size>\d+(?:\.\d+)?)(?P<unit>[KMGT]?)\b",
    re.DOTALL,
)

_FORMAT = "2"
"""Of what is kept on disk; another one when the same program is read in another way."""

# Besides the options of the call, these change what is compiled: environment and JAX's settings.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SETTINGS = (
    "jax_compiler_enable_remat_pass",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Bytes per device of one compiled program.

    ``peak`` is what has to be free for the program's values: ``arguments + outputs - aliased +
    temporaries``, mended for TPUs. Compilers also report a ``peak_memory_in_bytes``; what it is
    worth was measured with jax 0.10.2 and 0.12:

    - CPU: it leaves temporaries out; the sum is right.
    - CUDA: it leaves out the gaps between buffers (0.4 % of a 30 MB program); the sum is right.
    - TPU: it counts values that stay in on-chip memory or on the host (46 MiB for a program that
      takes 12), while the sum may count a buffer that is never allocated (2194 MiB for 2131). The
      smaller of both comes up to 2 MiB short of the least memory limit at which the compiler takes
      the program, and so does ``total_allocation_bytes``, which newer compilers report instead.

    Attributes:
        peak: Device memory needed, bytes; what the compiler said it needs when it refused.
        arguments: Bytes of arguments in device memory.
        outputs: Bytes of results in device memory.
        aliased: Bytes of results that take the place of donated arguments.
        temporaries: Bytes of everything else in device memory.
        host: Bytes of temporaries in pinned host memory. TPU: the compiler's figure, or what its
            program allocates if that is less (see ``host_buffers.py``).
        host_arguments: Bytes of arguments in host memory.
        host_outputs: Bytes of results in host memory, but for those that take the place of donated
            arguments there.
        refused: Whether the compiler refused the program as too large. All but ``peak`` and
            ``seconds`` are then zero.
        seconds: Time the compiler took; next to nothing when JAX had compiled the program before.
        code: Bytes of the program itself. A TPU has it in device memory too; its compiler makes it
            smaller where memory is short.
        overlap: What the schedule hides of the transfers between device and host, and what else the
            program takes; without transfers that is read of programs for GPUs only.
        wrong_fetches: Instructions that fetch other rows from the host than the program asks for.
        host_buffers: Bytes of each buffer that the program allocates in host memory, largest first.
        undone: Names of values that it keeps, or computes again, against what it was given.
        files: Slots in the spill store, and bytes of the value of each, that it writes and reads.
    """

    peak: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int
    host_arguments: int
    host_outputs: int
    refused: bool
    seconds: float
    code: int = 0
    overlap: Overlap = NO_TRANSFERS
    wrong_fetches: tuple[str, ...] = ()
    host_buffers: tuple[int, ...] = ()
    undone: tuple[str, ...] = ()
    files: tuple[tuple[int, int], ...] = ()

    @property
    def fixed(self) -> int:
        """Bytes of arguments and results, which no plan changes."""
        return self.arguments + self.outputs - self.aliased

    @property
    def all_host(self) -> int:
        """Bytes in host memory: of temporaries, arguments and results."""
        return self.host + self.host_arguments + self.host_outputs


def measure(
    lowered: jax.stages.Lowered,
    target: Target,
    compiler_options: Mapping[str, str | bool] | None = None,
    *,
    computed: Computed = NOTHING,
    executable: bool = False,
) -> tuple[jax.stages.Compiled | None, Measurement]:
    """Compiles a program and reads off its memory.

    What is measured is kept on disk under the program, the target, the options and the versions of
    the compilers, for attached devices under the machine, too. A program measured before is not
    compiled again unless its executable is wanted, or several processes run it: those compile
    together.

    Args:
        lowered: The program, lowered for ``target.devices()``. Compiler options given to
            ``jax.jit`` are not seen here: hand them over as ``compiler_options``.
        target: What it is compiled for.
        compiler_options: Options of XLA for this program.
        computed: Named values of the program, to be looked for in the compiled one.
        executable: Whether the compiled program is wanted.

    Returns:
        The compiled program and its measurement. The former is ``None`` when the measurement came
        from disk, or when the compiler refused the program.

    Raises:
        jax.errors.JaxRuntimeError: The compiler failed for another reason than size.
    """
    options = dict(compiler_options or {})
    if jax.process_count() > 1 and not target.ahead_of_time:
        return _compile(lowered, target, options, computed)
    name = _name(lowered, target, options, computed)
    known = None if executable else _read(name)
    if known is not None:
        return None, known
    compiled, measurement = _compile(lowered, target, options, computed)
    if target.ahead_of_time or not measurement.refused:  # else memory may be short just now
        cache.write("measurements", name, dataclasses.asdict(measurement))
    return compiled, measurement


def _name(
    lowered: jax.stages.Lowered, target: Target, options: Mapping[str, Any], computed: Computed
) -> str:
    """The cache's name for a program, the same in every process that lowers it."""
    return cache.key(
        _FORMAT,
        lowered.as_text(),
        target.name,
        *_machine(target),
        repr(target.rates),
        repr(sorted(options.items())),
        repr(sorted(computed.once)),
        repr(sorted(computed.recomputed)),
        *(os.environ.get(flags, "") for flags in _FLAGS),
        *(str(getattr(jax.config, setting, "")) for setting in _SETTINGS),
        *map(version, COMPILERS),
    )


def _machine(target: Target) -> tuple[str, ...]:
    """What a program for attached devices depends on, too; nothing for others."""
    if target.ahead_of_time:
        return ()
    return target.kind, platform.machine(), str(os.cpu_count())


def _read(name: str) -> Measurement | None:
    """The record of this name, if it has every field, each of its type."""
    record: dict[str, Any] = dict(cache.read("measurements", name) or {})
    try:
        record["overlap"] = Overlap.of_record(record["overlap"])
        record["wrong_fetches"] = tuple(record["wrong_fetches"])
        record["host_buffers"] = tuple(record["host_buffers"])
        record["undone"] = tuple(record["undone"])
        record["files"] = tuple((slot, size) for slot, size in record["files"])
    except (KeyError, TypeError, ValueError):
        return None
    fields = {f.name: get_origin(f.type) or f.type for f in dataclasses.fields(Measurement)}
    if any(type(record.get(name)) is not expected for name, expected in fields.items()):
        return None
    return Measurement(**{name: record[name] for name in fields})


def _compile(
    lowered: jax.stages.Lowered,
    target: Target,
    options: dict[str, str | bool],
    computed: Computed,
) -> tuple[jax.stages.Compiled | None, Measurement]:
    start = time.perf_counter()
    try:
        with _jax.names_count() if computed != NOTHING else contextlib.nullcontext():
            compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return None, _refused(needed, time.perf_counter() - start)
    return compiled, _measured(compiled, target, computed, time.perf_counter() - start)


def needed_bytes(message: str) -> int | None:
    """Bytes of device memory that a program needs, from the compiler's refusal to make room.

    ``None`` when the message is about something else. The TPU compiler rounds to four digits or so
    ("15.76G"), and has two forms of this message.
    """
    match = _REFUSAL.search(message)
    return match and round(float(match["size"]) * _UNITS[match["unit"]])


def _refused(needed: int, seconds: float) -> Measurement:
    return Measurement(
        peak=needed,
        arguments=0,
        outputs=0,
        aliased=0,
        temporaries=0,
        host=0,
        host_arguments=0,
        host_outputs=0,
        refused=True,
        seconds=seconds,
    )


def _measured(
    compiled: jax.stages.Compiled, target: Target, computed: Computed, seconds: float
) -> Measurement:
    stats: Any = compiled.memory_analysis()
    total: int = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return Measurement(
        peak=_peak(stats, total, target.backend.reading),
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host_arguments=stats.host_argument_size_in_bytes,
        host_outputs=stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes,
        refused=False,
        seconds=seconds,
        **_read_off(compiled, target, computed, stats.host_temp_size_in_bytes),
    )


def _read_off(
    compiled: jax.stages.Compiled, target: Target, computed: Computed, reported: int
) -> dict[str, Any]:
    """What only the text says: which names are undone, what is on the host or in files."""
    reading = target.backend.reading
    if not (reported or reading.has_overlap or computed != NOTHING):
        return {"host": 0}
    text = compiled.as_text() or ""
    undone, spills = computed.undone(text), WRITE in text
    if not (reported or reading.has_overlap or spills):
        return {"host": 0, "undone": undone}
    program = parse(text)
    said: dict[str, Any] = {"undone": undone, "files": file_calls(program) if spills else ()}
    if reported or reading.has_overlap:
        said["overlap"] = read_overlap(program, target.rates)
    if not reported:
        return {"host": 0, **said}
    on_host = buffers(program)
    return {
        "host": min(reported, sum(on_host)) if reading.counts_on_chip else reported,
        "host_buffers": on_host,
        "wrong_fetches": tuple(forward_fetches(program)) if reading.may_misorder_fetches else (),
        **said,
    }


def _peak(stats: Any, total: int, reading: Reading) -> int:
    """The figure nearest to what the compiler checks against the device's memory."""
    allocated: int = getattr(stats, "total_allocation_bytes", 0)
    if allocated:
        return allocated
    return min(total, stats.peak_memory_in_bytes) if reading.counts_on_chip else total
