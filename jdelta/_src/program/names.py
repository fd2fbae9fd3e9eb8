"""Names for the values a backward pass can ask for: given after JVP, one for each true residual.

``checkpoint_name`` on the output of ``exp`` or ``tanh`` saves nothing, since the derivative rule
reads the un-named answer; and values such as a softmax denominator or a mask exist only inside
library functions. Hence the names are put into the *staged JVP* of a region: every value there
that does not depend on a tangent gets a name, made of the region, the scopes and nested ``jit``
names it was traced under, and its primitive.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jdelta._src import _jax
from jdelta._src._jax import Atom, Eqn, Jaxpr, Var
from jdelta._src.program.hlo_names import RECOMPUTE, is_mark, mark, marked
from jdelta._src.program.primitives import VIEWS

Path: TypeAlias = tuple[str, ...]
"""Scopes from the outermost: ``("h", "0", "mlp")``."""

_TRANSFORM = re.compile(r"\w+\(([^()]*)\)")

_CLASS = "eqx."
"""How the scopes begin that Equinox puts around its layers: their classes, not their places."""


@functools.lru_cache(maxsize=1 << 14)
def scope_path(stack: str) -> Path:
    """Scopes of a name stack without those of transformations such as ``jvp(...)``, and marks.

    Numbers in front are left out too: penzai has them for the places in a list without a name.
    """
    while _TRANSFORM.search(stack):
        stack = _TRANSFORM.sub(r"\1", stack)
    modules = (part for part in stack.split("/") if part and _is_module(part))
    return tuple(itertools.dropwhile(str.isdigit, modules))


def _is_module(scope: str) -> bool:
    return scope != RECOMPUTE and not is_mark(scope) and not scope.startswith(_CLASS)


def common(paths: Sequence[Path]) -> Path:
    """The longest path that all of them begin with."""
    levels = zip(*paths, strict=False)
    return tuple(level[0] for level in itertools.takewhile(lambda x: len(set(x)) == 1, levels))


def inner_path(path: Path, base: Path) -> Path:
    """A path without what the name of its region says already.

    A module's scope begins with its own name (of a nested one, its last part), that of a region
    found with all of it; what stands in front of the region's module shares a part of it.
    """
    own = base[-1:] if path[:1] == base[-1:] else common([path, base])
    return path[len(own if path[: len(base)] != base else base) :]


class RegionName(str):
    """A name given here, told apart from any ``checkpoint_name`` of the user's.

    Attributes:
        region: Name of the region, the first part of the name.
        loops: Number of loops of the region itself that the value is in.
        conditional: Whether it is in a branch of a ``cond`` of the region itself.
        is_input: Whether it names an input of the region.
        user_name: The user's own ``checkpoint_name`` of the value; empty where it has none.
    """

    region: str
    loops: int
    conditional: bool
    is_input: bool
    user_name: str

    def __new__(
        cls,
        region: str,
        inner: str,
        loops: int = 0,
        *,
        conditional: bool = False,
        is_input: bool = False,
        user_name: str = "",
    ) -> RegionName:
        """The name ``region/inner``."""
        self = super().__new__(cls, f"{region}/{inner}")
        self.region = region
        self.loops = loops
        self.conditional = conditional
        self.is_input = is_input
        self.user_name = user_name
        return self

    def of_region(self, region: str) -> RegionName:
        """The name of the same value of another region."""
        inner = self.removeprefix(f"{self.region}/")
        kept = {"conditional": self.conditional, "is_input": self.is_input}
        return RegionName(region, inner, self.loops, **kept, user_name=self.user_name)


def names_in(program: Jaxpr) -> frozenset[str]:
    """All names in a program, those of values that nothing reads included."""
    return frozenset(map(str, filter(None, map(_jax.named_value, _jax.equations(program)))))


def with_regions_renamed(program: Jaxpr, regions: Mapping[str, str]) -> Jaxpr:
    """A program whose regions have other names, in those of their values and in its marks.

    Args:
        program: The program.
        regions: From the names of its regions to those in their place. One that is not there, since
            no result of the program depends on it, is called as before.
    """
    names: dict[str, RegionName] = {
        name: name.of_region(regions[name.region])
        for name in map(_jax.named_value, _jax.equations(program))
        if isinstance(name, RegionName) and name.region in regions
    }
    marks = {mark(old): mark(new) for old, new in (*regions.items(), *names.items())}

    def renamed(body: Jaxpr) -> Jaxpr:
        return _jax.with_equations(body, list(map(one, _jax.open_jaxpr(body).eqns)))

    def one(eqn: Eqn) -> Eqn:
        name = names.get(_jax.named_value(eqn) or "")
        eqn = _jax.renamed(eqn, name) if name else eqn
        return _jax.with_bodies(_jax.with_scopes(eqn, lambda s: marks.get(s, s)), renamed)

    return renamed(program)


class _Namer:
    """Hands out names below one region; repeated ones get ``_1``, ``_2``… in program order."""

    def __init__(self, region: str, base: str):
        self._region = region
        self._own = tuple(base.split("/"))
        self._used: Counter[str] = Counter()

    def input(self, user_name: str) -> RegionName:
        """A name for the region's next input: that which the user gives it there, if any."""
        inner = self._unique(user_name or "input")
        return RegionName(self._region, inner, is_input=True, user_name=user_name)

    def __call__(
        self, path: Sequence[str], last: str, loops: int, *, conditional: bool, user_name: str
    ) -> RegionName:
        inner = self._unique("/".join((*inner_path(tuple(path), self._own), last)))
        return RegionName(self._region, inner, loops, conditional=conditional, user_name=user_name)

    def _unique(self, inner: str) -> str:
        self._used[inner] += 1
        repeat = self._used[inner] - 1
        return f"{inner}_{repeat}" if repeat else inner


def add_names(closed: Jaxpr, tangent: Sequence[bool], region: str, base: str) -> Jaxpr:
    """Name every value of a staged JVP that does not depend on a tangent.

    Args:
        closed: The staged JVP of a region.
        tangent: For each input whether it is a tangent.
        region: The region's name, the first part of every name given.
        base: The name without the number of the call; scopes that begin with it lose it.

    Returns:
        A closed jaxpr that computes the same, calls inlined, names inserted.
    """
    return _Rewrite(closed, tangent, _Namer(region, base)).result()


class _Rewrite:
    """One pass over a jaxpr: inline calls, follow tangents, insert names."""

    def __init__(
        self,
        closed: Jaxpr,
        tangent: Sequence[bool],
        namer: _Namer,
        path: tuple[str, ...] = (),
        loops: int = 0,
        *,
        names_inputs: bool = True,
        conditional: bool = False,
    ):
        self.closed = closed
        self.namer = namer
        self.loops = loops
        self.conditional = conditional
        self.eqns: list[Eqn] = []
        self.new_consts: dict[Var, Any] = {}
        self.became: dict[Var, Atom] = {}
        inner = _jax.open_jaxpr(closed)
        self.tangents = {
            v for v, is_tangent in zip(inner.invars, tangent, strict=True) if is_tangent
        }
        if names_inputs and not loops and not conditional:
            self._inputs(inner.invars, inner.eqns)
        self._equations(inner.eqns, path)
        self.eqns = marked(_with_buffers_named(self.eqns))
        self.outvars = [self._now(v) for v in inner.outvars]

    def result(self) -> Jaxpr:
        return _jax.rebuild(self.closed, self.eqns, self.outvars, self.new_consts)

    def tangent_outputs(self) -> list[bool]:
        return [v in self.tangents if _jax.is_var(v) else False for v in self.outvars]

    def _now(self, atom: Atom) -> Atom:
        return self.became.get(atom, atom) if _jax.is_var(atom) else atom

    def _equations(self, eqns: Sequence[Eqn], path: tuple[str, ...]) -> None:
        for eqn in map(_jax.plain, eqns):
            if _jax.may_inline(eqn):
                self._inline(eqn, path)
            else:
                self._keep(eqn, path)

    def _inputs(self, invars: Sequence[Var], eqns: Sequence[Eqn]) -> None:
        """Name the inputs, so that one that the step computes may be offloaded."""
        user_names = {eqn.invars[0]: _user_name(eqn) for eqn in eqns if _user_name(eqn)}
        for var in invars:
            named = hasattr(var.aval, "shape") and not _jax.is_complex(var)
            if var not in self.tangents and eqns and named:
                self.became[var] = named = _jax.new_var(var.aval)
                self.eqns.append(
                    _jax.name_equation(
                        var, named, self.namer.input(user_names.get(var, "")), eqns[0]
                    )
                )

    def _inline(self, eqn: Eqn, path: tuple[str, ...]) -> None:
        body = _jax.subjaxpr(eqn)
        inner = _jax.open_jaxpr(body)
        for var, value in zip(inner.constvars, _jax.consts_of(body), strict=True):
            fresh = self.became[var] = _jax.new_var(var.aval)
            self.new_consts[fresh] = value
        for var, atom in zip(inner.invars, eqn.invars, strict=True):
            self.became[var] = self._now(atom)
        called = eqn.params.get("name")
        below = (*path, *scope_path(_jax.name_stack(eqn)), *((called,) if called else ()))
        self._equations([_jax.at_call(e, eqn) for e in inner.eqns], below)
        for outer, atom in zip(eqn.outvars, inner.outvars, strict=True):
            self.became[outer] = self._now(atom)

    def _keep(self, eqn: Eqn, path: tuple[str, ...]) -> None:
        path = (*path, *scope_path(_jax.name_stack(eqn)))
        invars = [self._now(v) for v in eqn.invars]
        tangent_in = [_jax.is_var(v) and v in self.tangents for v in invars]
        params, tangent_out = eqn.params, [any(tangent_in)] * len(eqn.outvars)
        if eqn.primitive.name == "shard_map":
            body, tangent_out = self._mapped_body(params["jaxpr"], tangent_in, path)
            params = {**params, "jaxpr": body}
        elif eqn.primitive.name == "scan":
            body, tangent_out = self._scan_body(eqn, tangent_in, path)
            params = {**params, "jaxpr": body}
        elif any(tangent_in) and eqn.primitive.name == "cond":
            branches, tangent_out = self._branches(eqn, tangent_in, path)
            params = {**params, "branches": branches}
        elif any(tangent_in) and eqn.primitive.name == "while":
            tangent_out = _while_tangents(eqn, tangent_in)
        outvars = [_jax.new_var(v.aval) if _jax.is_var(v) else v for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
        user_name = _user_name(eqn)
        for old, new, is_tangent in zip(eqn.outvars, outvars, tangent_out, strict=True):
            if not _jax.is_var(old):
                continue
            self.became[old] = new
            if is_tangent:
                self.tangents.add(new)
            elif _jax.is_complex(old):
                self.became[old] = self._parts(new, path, user_name or _jax.label(eqn), eqn)
            elif hasattr(old.aval, "shape"):
                self.became[old] = self._named(
                    new, path, user_name or _jax.label(eqn), eqn, user_name
                )

    def _named(
        self, var: Var, path: tuple[str, ...], last: str, like: Eqn, user_name: str = ""
    ) -> Var:
        named = _jax.new_var(var.aval)
        name = self.namer(path, last, self.loops, conditional=self.conditional, user_name=user_name)
        self.eqns.append(_jax.name_equation(var, named, name, like))
        return named

    def _parts(self, var: Var, path: tuple[str, ...], last: str, like: Eqn) -> Var:
        """A complex value made of its named parts: JAX keeps no complex residual under a policy."""
        parts: list[Var] = []
        for part in _jax.part_equations(var, like):
            self.eqns.append(part)
            parts.append(self._named(part.outvars[0], (*path, last), part.primitive.name, like))
        complex_var = _jax.new_var(var.aval)
        self.eqns.append(_jax.complex_equation(parts, complex_var, like))
        return complex_var

    def _mapped_body(
        self, body: Jaxpr, tangent_in: Sequence[bool], path: tuple[str, ...]
    ) -> tuple[Jaxpr, list[bool]]:
        """The body of a ``shard_map`` with names, and which of its outputs are tangents."""
        rewrite = _Rewrite(body, tangent_in, self.namer, path, self.loops, names_inputs=False)
        named = _jax.open_jaxpr(rewrite.result())
        # It can have no constants of its own; calls that bring some are rare.
        return body if rewrite.new_consts else named, rewrite.tangent_outputs()

    def _scan_body(
        self, eqn: Eqn, tangent_in: Sequence[bool], path: tuple[str, ...]
    ) -> tuple[Jaxpr, list[bool]]:
        """The scan's body with names, and which of the scan's outputs are tangents."""
        body = eqn.params["jaxpr"]
        tangent_in = _carry_fixpoint(eqn, tangent_in)
        rewrite = _Rewrite(
            body,
            tangent_in,
            self.namer,
            (*path, "scan"),
            self.loops + 1,
            conditional=self.conditional,
        )
        return rewrite.result(), _scan_outputs(eqn, tangent_in, rewrite.tangent_outputs())

    def _branches(
        self, eqn: Eqn, tangent_in: Sequence[bool], path: tuple[str, ...]
    ) -> tuple[tuple[Jaxpr, ...], list[bool]]:
        """The branches of a ``cond`` with names, and which of its outputs are tangents."""
        branches: list[Jaxpr] = []
        tangent_out: list[list[bool]] = []
        for branch in eqn.params["branches"]:
            rewrite = _Rewrite(
                branch, tangent_in[1:], self.namer, (*path, "cond"), self.loops, conditional=True
            )
            named = rewrite.result()
            branches.append(branch if _jax.consts_of(named) else named)  # JAX expects none there
            tangent_out.append(rewrite.tangent_outputs())
        return tuple(branches), [any(marks) for marks in zip(*tangent_out, strict=True)]


def _user_name(eqn: Eqn) -> str:
    """The user's own name of what an equation makes; empty where there is none."""
    name = _jax.named_value(eqn)
    return name.user_name if isinstance(name, RegionName) else name or ""


def _with_buffers_named(eqns: Sequence[Eqn]) -> list[Eqn]:
    """Where the user named a view, the buffer it is a view of gets that name, the view the other's.

    A kept view is of no use to what reads the buffer: it would be computed again.
    """
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    named = list(eqns)
    for i, eqn in enumerate(eqns):
        user = _jax.named_value(eqns[i - 1]) if i else None
        name = _jax.named_value(eqn)
        if not isinstance(name, RegionName) or user is None or isinstance(user, RegionName):
            continue
        buffer = _first_name(eqns, maker, i)
        other = _jax.named_value(named[buffer])
        if isinstance(other, RegionName) and not other.is_input:
            named[buffer] = _jax.renamed(named[buffer], name)
            named[i] = _jax.renamed(named[i], other)
    return named


def _first_name(eqns: Sequence[Eqn], maker: Mapping[Var, int], index: int) -> int:
    """Of the equations that name a buffer or a view of it, the first before ``index``."""
    first, at = index, maker.get(eqns[index].invars[0])
    while at is not None and eqns[at].primitive.name in VIEWS and _jax.is_var(eqns[at].invars[0]):
        first = at if isinstance(_jax.named_value(eqns[at]), RegionName) else first
        at = maker.get(eqns[at].invars[0])
    return first


def _dependent(jaxpr: Jaxpr, tangent: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr depend on the inputs marked in ``tangent``."""
    return _Rewrite(jaxpr, tangent, _Namer("", "")).tangent_outputs()


def _carry_fixpoint(eqn: Eqn, tangent_in: Sequence[bool]) -> list[bool]:
    """Inputs of a scan that carry a tangent in some iteration."""
    marks = list(tangent_in)
    consts, carry = _jax.scan_counts(eqn.params)
    while True:
        out = _dependent(eqn.params["jaxpr"], marks)[:carry]
        merged = [a or b for a, b in zip(marks[consts : consts + carry], out, strict=True)]
        if merged == marks[consts : consts + carry]:
            return marks
        marks[consts : consts + carry] = merged


def _scan_outputs(eqn: Eqn, inputs: Sequence[bool], body: Sequence[bool]) -> list[bool]:
    consts, carry = _jax.scan_counts(eqn.params)
    return [*inputs[consts : consts + carry], *body[carry:]]


def _while_tangents(eqn: Eqn, tangent_in: Sequence[bool]) -> list[bool]:
    """Which outputs of a ``while`` depend on a tangent."""
    skip = eqn.params["cond_nconsts"]
    consts = list(tangent_in[skip : skip + eqn.params["body_nconsts"]])
    carry = list(tangent_in[skip + len(consts) :])
    while True:
        out = _dependent(eqn.params["body_jaxpr"], consts + carry)
        merged = [a or b for a, b in zip(carry, out, strict=True)]
        if merged == carry:
            return carry
        carry = merged
