"""The staged step: forward, backward and update in one graph, and the regions marked in it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jdelta._src import _jax
from jdelta._src._jax import Jaxpr
from jdelta._src._jax.sharding import Shardings, Spec, shardings_of
from jdelta._src.errors import JdeltaError, TraceError
from jdelta._src.program.graph import Graph, graph_of
from jdelta._src.program.loop_nest import Nest, walk
from jdelta._src.program.names import RegionName, names_in, with_regions_renamed
from jdelta._src.regions.find import tracing
from jdelta._src.regions.head_product import LargeHead, large_head
from jdelta._src.regions.region import AS_WRITTEN, Grouping, MarkedError, Session


@dataclass(frozen=True)
class Region:
    """A region of the step.

    Attributes:
        name: Its name in plans.
        traced: Its name while tracing, ``base#call``.
        graph: Its JVP with every value named, loops unfolded, in the names of ``traced``.
        primals: How many of the graph's inputs are no tangents (the first ones).
        nest: The loops around it.
        conditional: Whether it is in a branch of a ``cond``.
        partly: Whether some inexact argument of it is not differentiated.
        copies: From the names of the values that the step computes to how many of each it has at
            once: ``jax.vmap`` around ``jax.grad`` is not seen in ``graph``. What no result of the
            step depends on is not there.
    """

    name: str
    traced: str
    graph: Graph
    primals: int
    nest: Nest
    conditional: bool
    partly: bool
    copies: Mapping[str, int]


@dataclass(frozen=True)
class Recorded:
    """A step's program as it was recorded, with marks that say which region an equation is of.

    Attributes:
        closed: The program.
        results: The tree of its results.
        aliases: From the name of each region in it to its name in plans.
    """

    closed: Jaxpr
    results: Any
    aliases: Mapping[str, str]

    @functools.cached_property
    def program(self) -> Jaxpr:
        """The program, calls inlined, with the names of plans."""
        return with_regions_renamed(_jax.inline(self.closed), self.aliases)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All names in the program."""
        return names_in(self.program)


@dataclass(frozen=True)
class Trace:
    """A step as one program.

    Attributes:
        closed: The step as it was staged.
        graph: The un-rematerialised step, with the names of its regions' values in it.
        regions: Its regions, in the order of the forward pass. Without a gradient there are none.
        automatic: Whether they were found in the program, since no gradient goes through any that
            is marked.
        outside: Whether what does not depend on the arguments of a differentiated function is
            computed outside of it, since some of it leaves the function by a closure.
        uncut: Why there are none although the step may have some: what to do about it. Empty where
            there is no such reason.
        grouping: How its loops over layers are run.
        fingerprint: Digest of the program; equal programs have equal ones on every process.
        recorded: The program itself; None where plans are not made of it.
    """

    closed: Jaxpr
    graph: Graph
    regions: tuple[Region, ...]
    automatic: bool
    grouping: Grouping
    fingerprint: str
    outside: bool = False
    uncut: str = ""
    recorded: Recorded | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The first mesh that the program names."""
        return next(_jax.meshes_in(self.closed), None)

    @property
    def aliases(self) -> dict[str, str]:
        """From the name of each region while tracing to its name in plans."""
        return {region.traced: region.name for region in self.regions}

    @property
    def loops(self) -> dict[str, int]:
        """From the name of each region in plans to the number of loops that keep its values."""
        return {region.name: region.nest.loops for region in self.regions}

    @property
    def trips(self) -> dict[str, int]:
        """From the name of each region in a loop that keeps its values to how many it keeps."""
        return {region.name: region.nest.kept for region in self.regions if region.nest.loops}

    @property
    def longest(self) -> int:
        """Iterations of the longest loop that the step differentiates; 1 without any."""
        loops = (op for op, _ in walk(self.graph) if op.primitive == "scan" and op.differentiated)
        return max((op.trips for op in loops), default=1)

    @property
    def head(self) -> LargeHead | None:
        """The product that makes the logits; None if none makes much more than it reads."""
        return large_head(self.graph)

    @property
    def together(self) -> frozenset[str]:
        """Names in plans of the regions that run several times in an iteration of a loop."""
        return frozenset(region.name for region in self.regions if region.nest.together)

    @property
    def row_bytes(self) -> int:
        """Bytes of what the layers of loops have rows of: their weights."""
        return _row_bytes(self.graph)

    @property
    def partly(self) -> frozenset[str]:
        """Names in plans of the regions of which some inexact argument is not differentiated."""
        return frozenset(region.name for region in self.regions if region.partly)

    def plan_name(self, name: str) -> str:
        """The name in plans of a value; that of a value in no region as it is."""
        if not isinstance(name, RegionName):
            return name
        return self.aliases[name.region] + name.removeprefix(name.region)


def trace(
    step_fn: Callable[..., Any],
    *args: Any,
    platform: str = "cpu",
    grouping: Grouping = AS_WRITTEN,
) -> Trace:
    """Stage a step and find its regions: those marked, or its own if no gradient reaches those.

    Args:
        step_fn: The step.
        *args: Its arguments, or their shapes, with their shardings.
        platform: Where it is to run.
        grouping: How its loops over layers are to be run.

    Raises:
        TraceError: JAX does not trace the step with its loops run so. Where it traces it with no
            regions at all, that is what is returned.
    """
    try:
        return _with_regions(step_fn, args, platform, grouping)
    except Exception as error:
        reason = error  # where the step itself is at fault, its own error comes next
    staged = _staged(step_fn, args, None, platform)
    uncut = uncut_reason(reason)
    if grouping != AS_WRITTEN:
        raise TraceError(uncut) from reason
    return Trace(staged.closed, staged.graph, (), False, grouping, staged.fingerprint, uncut=uncut)


@contextlib.contextmanager
def own_errors_only(
    step_fn: Callable[..., Any], args: tuple[Any, ...], platform: str
) -> Generator[None]:
    """Give what fails a name where the step by itself does not fail; its own errors pass.

    Args:
        step_fn: The step that something is done to.
        args: Its arguments, or their shapes, with their shardings.
        platform: Where it is to run.

    Raises:
        TraceError: Something failed that is not the step's own fault.
    """
    try:
        yield
        return
    except JdeltaError:
        raise
    except Exception as error:
        failure = error
    try:
        plain = jax.jit(step_fn).trace(*args).lower(lowering_platforms=(platform,))
        if isinstance(failure, jax.errors.JaxRuntimeError):
            plain.compile()
    except Exception as own:
        raise own from None  # told once, as jax.jit tells it
    raise TraceError(uncut_reason(failure)) from failure


def uncut_reason(error: Exception) -> str:
    """Why a step that JAX traces is not traced with regions, in words for its user."""
    if isinstance(error, JdeltaError):
        return str(error)
    place = _jax.place_of_error(error)
    said = next(iter(str(error).splitlines()), "")
    return (
        "JAX traces the step, but not cut into regions"
        f"{f', because of {place}' if place else ''}: {type(error).__name__}: {said}. Mark regions "
        "with jdelta.remat that leave this out."
    )


def _with_regions(
    step_fn: Callable[..., Any], args: tuple[Any, ...], platform: str, grouping: Grouping
) -> Trace:
    session, staged = _recorded(step_fn, args, platform, grouping)
    shardings, graph, nests = staged.shardings, staged.graph, staged.nests
    conditional = _in_branches(graph)
    sizes = _bytes_by_name(graph)
    names = _plan_names(list(nests), sizes)

    def region(traced: str, nest: Nest) -> Region:
        derivative, primals = _derivative(session, traced, shardings)
        return Region(
            name=names[traced],
            traced=traced,
            graph=derivative,
            primals=primals,
            nest=nest,
            conditional=traced in conditional,
            partly=traced in session.partly,
            copies=_copies(_bytes_by_name(derivative), sizes),
        )

    regions = tuple(region(traced, nest) for traced, nest in nests.items())
    # A nested loop gets its further jax.checkpoint only under a policy.
    recorded = None if grouping.nested else Recorded(staged.closed, staged.results, names)
    return Trace(
        staged.closed,
        graph,
        regions,
        session.automatic and session.gradients > 0,
        grouping,
        staged.fingerprint,
        session.outside,
        recorded=recorded,
    )


def _recorded(
    step_fn: Callable[..., Any], args: tuple[Any, ...], platform: str, grouping: Grouping
) -> tuple[Session, _Staged]:
    """The step with its marked regions; with its own if no gradient reaches those."""
    failure: Exception | None = None
    try:
        return _with_own_regions(step_fn, args, platform, grouping, until_marked=True)
    except MarkedError:
        pass
    except Exception as error:  # a region may be marked behind what failed
        failure = error
    session = Session(grouping=grouping)
    staged = _staged(step_fn, args, session, platform)
    if staged.nests or (not session.gradients and not failure):
        return session, staged
    if failure:
        raise failure
    return _with_own_regions(step_fn, args, platform, grouping)


def _with_own_regions(
    step_fn: Callable[..., Any],
    args: tuple[Any, ...],
    platform: str,
    grouping: Grouping,
    *,
    until_marked: bool = False,
) -> tuple[Session, _Staged]:
    """The step with the regions that are found in it.

    Raises:
        MarkedError: The user marked some, and ``until_marked``.
    """
    begun = functools.partial(Session, automatic=True, grouping=grouping, until_marked=until_marked)
    try:
        session = begun()
        return session, _staged(step_fn, args, session, platform)
    except _LeakError:
        session = begun(outside=True)
        return session, _staged(step_fn, args, session, platform)


class _LeakError(TraceError):
    """A value leaves a function that is differentiated, and not as a result."""


class _Staged(NamedTuple):
    """A step as one session saw it, or as it is.

    Attributes:
        closed: The staged step.
        results: The tree of its results.
        shardings: How its values are sharded.
        graph: The program.
        nests: From each region in it, by its name while tracing, to the loops around it.
    """

    closed: Jaxpr
    results: Any
    shardings: Shardings
    graph: Graph
    nests: dict[str, Nest]

    @property
    def fingerprint(self) -> str:
        """Digest of the program, and of how its values are sharded."""
        return _jax.digest(self.closed, [value.spec for value in self.graph.values])


def _staged(
    step_fn: Callable[..., Any], args: tuple[Any, ...], session: Session | None, platform: str
) -> _Staged:
    def traced(*args: Any) -> Any:
        with tracing(session, *args) if session else contextlib.nullcontext():
            return step_fn(*args)

    closed, results = _jax.stage(traced, *args)
    leaked = _jax.leaked(closed)
    if leaked is not None and session is None:  # JAX says what is wrong
        jax.jit(step_fn).trace(*args).lower(lowering_platforms=(platform,))
    if leaked is not None:
        # What has to happen once would come too early outside of the function.
        may_be_outside = session and session.automatic and _jax.first_once(closed) is None
        raise (_LeakError if may_be_outside else TraceError)(_leaving(leaked))
    shardings = shardings_of(closed, args, platform)
    graph = graph_of(closed, shardings)
    return _Staged(closed, results, shardings, graph, _nests(graph))


def _leaving(leaked: Any) -> str:
    place = _jax.place_of_tracer(leaked)
    return (
        f"A value computed{f' at {place}' if place else ''} leaves the function that is "
        "differentiated in another way than as a result: kept in a list or an attribute, assigned "
        "to a nonlocal name, or read by a rule made inside. Return it (has_aux=True), or compute "
        "it outside of that function."
    )


def _nests(graph: Graph) -> dict[str, Nest]:
    """From each region in a program, by its name while tracing, to the loops around it."""
    nests: dict[str, Nest] = {}
    for op, nest in walk(graph):
        if isinstance(op.name, RegionName) and op.name.loops == 0:
            # JAX hoists what does not change out of loops: the deepest values tell.
            deepest = nests.get(op.name.region, nest)
            nests[op.name.region] = max(deepest, nest, key=lambda n: (n.loops, n.trips))
    return nests


def _derivative(session: Session, traced: str, step: Shardings) -> tuple[Graph, int]:
    """The derivative of a region as far as gradients need it, its values sharded as in the step."""
    closed, primals = session.derivatives[traced]
    if session.reached:  # else nothing is differentiated in reverse
        count = len(_jax.open_jaxpr(closed).outvars) // 2
        reached = [i in session.reached[traced] for i in range(count)]
        closed = _jax.with_outputs(closed, [*[True] * count, *reached])
    specs: dict[_jax.Var, Spec] = {}
    for eqn in _jax.equations(closed):
        name = _jax.named_value(eqn)
        if name is not None and name in step.named:
            spec = step.of_one(name, eqn.outvars[0].aval.shape)
            specs[eqn.outvars[0]] = specs[eqn.invars[0]] = spec
    return graph_of(closed, dataclasses.replace(step, specs=specs), unfold_loops=True), primals


def _in_branches(graph: Graph, *, inside: bool = False) -> set[str]:
    """The regions, by their names while tracing, that are in a branch of a ``cond``."""
    names: set[str] = set()
    for op in graph.operations:
        if inside and isinstance(op.name, RegionName) and not op.name.conditional:
            names.add(op.name.region)
        for body in op.bodies:
            names |= _in_branches(body, inside=inside or op.primitive == "cond")
    return names


def _row_bytes(graph: Graph) -> int:
    """Of the innermost loops that regions are in."""
    total = 0
    for op in graph.operations:
        if op.body is None or op.backward:
            continue
        inside = _row_bytes(op.body)
        if not inside and op.primitive == "scan" and _has_region(op.body):
            rows = op.inputs[sum(_jax.scan_counts(op.params)) :]
            inside = sum(graph.values[v].bytes for v in rows)
        total += inside
    return total


def _has_region(graph: Graph) -> bool:
    return any(isinstance(op.name, RegionName) for op in graph.operations)


def _bytes_by_name(graph: Graph) -> dict[str, int]:
    """Bytes of each value with a name given here."""
    sizes: dict[str, int] = {}
    for op in graph.operations:
        if isinstance(op.name, RegionName):
            sizes.setdefault(op.name, graph.values[op.outputs[0]].bytes)
        for body in op.bodies:
            sizes = {**_bytes_by_name(body), **sizes}
    return sizes


def _copies(one: Mapping[str, int], totals: Mapping[str, int]) -> dict[str, int]:
    """How many there are of each value that the step has."""
    return {name: max(1, totals[name] // max(1, b)) for name, b in one.items() if name in totals}


def _plan_names(traced: Sequence[str], values: Iterable[str]) -> dict[str, str]:
    """Names for plans: the base alone where it is unique, else numbered in program order.

    Args:
        traced: The regions by their names while tracing.
        values: The names of their values.
    """
    calls: dict[str, list[str]] = {}
    for name in traced:
        calls.setdefault(_base(name), []).append(name)
    inner = _inner_names(values)
    taken = set(calls)
    names: dict[str, str] = {}
    for base, group in calls.items():
        numbers = (f"{base}_{n}" for n in itertools.count())
        free = (name for name in numbers if name not in taken)
        is_alone = len(group) == 1 and not _looks_like_another(base, inner)
        names.update((name, base if is_alone else next(free)) for name in group)
    return names


def _base(traced: str) -> str:
    return traced.rsplit("#", 1)[0]


def _inner_names(values: Iterable[str]) -> dict[str, set[str]]:
    """The names of values without their region's, by the base of that."""
    names: dict[str, set[str]] = {}
    for name in values:
        if isinstance(name, RegionName):
            names.setdefault(_base(name.region), set()).add(name.removeprefix(name.region))
    return names


def _looks_like_another(base: str, inner: Mapping[str, set[str]]) -> bool:
    """Whether a value would have the name of one in another region, whose name begins alike."""
    return any(
        f"{other.removeprefix(base)}{name}" in inner.get(base, ())
        for other in inner
        if other.startswith(f"{base}/")
        for name in inner[other]
    )
