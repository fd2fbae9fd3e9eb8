"""Steps and what ``jax.jit`` is told of them, by the user or by what made the step already."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax

from jdelta._src.errors import ArgumentError

Arguments = tuple[int | str, ...]
"""Arguments of a step, by number or by name: ``(0, "cache")``."""

_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_NOT_TAKEN = {
    "device": "place the arguments (jax.device_put), or name the target (target=)",
    "backend": "name the target: target='cpu', 'cuda' or 'tpu'",
    "keep_unused": "leave it out: what the step does not read counts as in jax.jit",
    "inline": "leave it out: a planned step is a program of its own",
    "abstracted_axes": "jdelta plans for shapes: call the step with each, it is planned for each",
    "compiler_options": "set XLA_FLAGS, or LIBTPU_INIT_ARGS, for the whole process",
}
"""What ``jax.jit`` takes and jdelta does not, and what to write."""


_ALL_ARGUMENTS = ("args", "kwargs")
"""Names by which some give all arguments of a step at once."""

_CLOSE = 0.7
"""How alike two names have to be for one to be meant by the other, as difflib counts."""

OPTIONS = (
    "donate_argnums",
    "donate_argnames",
    "static_argnums",
    "static_argnames",
    "in_shardings",
    "out_shardings",
)
"""What is taken of ``jax.jit``'s options."""


@dataclass(frozen=True)
class Jitted:
    """A step and what ``jax.jit`` is told of it.

    Attributes:
        fun: The step itself, not jitted.
        donate: Arguments whose buffers the results may take.
        static: Arguments that are constants of the program.
        in_shardings: Where the other arguments given by position are to be, a tree or the beginning
            of one; None leaves them where they are.
        out_shardings: Where the results are to be, likewise.
        first: What stands before the arguments of a call: the object that a method belongs to, or
            the modules that ``functools.partial`` binds.
        filtered: Whether what is no array is a constant, as for ``eqx.filter_jit``.
    """

    fun: Callable[..., Any]
    donate: Arguments = ()
    static: Arguments = ()
    in_shardings: Any = None
    out_shardings: Any = None
    first: tuple[Any, ...] = ()
    filtered: bool = False

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of a call, in order; none where the step does not tell."""
        try:
            parameters = list(inspect.signature(self.fun).parameters.items())
        except (TypeError, ValueError):  # some callables have no signature
            return MappingProxyType({})
        return MappingProxyType(dict(parameters[len(self.first) :]))

    @functools.cached_property
    def first_names(self) -> tuple[str, ...]:
        """What the step calls what stands before the arguments of a call."""
        if not self.first:
            return ()
        return tuple(inspect.signature(self.fun).parameters)[: len(self.first)]

    @property
    def name(self) -> str:
        """What to call the step in messages."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    @property
    def place(self) -> str:
        """Where the step comes from: ``"mystep:train_step"``; its name alone in a script."""
        own: Any = type(self.first[0]) if self.fun is _called else self.fun
        module = getattr(own, "__module__", None) or ""
        name = getattr(own, "__qualname__", self.name).replace("<locals>.", "")
        return name if module in ("", "__main__") else f"{module}:{name}"

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The parameters of a call, to bind one to."""
        return inspect.Signature(list(self.parameters.values()))

    def binds(self, *args: Any) -> bool:
        """Whether the step takes these arguments, and no more."""
        try:
            self.signature.bind(*args)
        except TypeError:
            return False
        return True

    @functools.cached_property
    def positions(self) -> list[str]:
        """Names of the parameters that may be given by position."""
        return [name for name, p in self.parameters.items() if p.kind in _KINDS]

    def is_open(self, kind: Any) -> bool:
        """Whether the step takes any number of arguments of a kind, or does not tell."""
        kinds = [p.kind for p in self.parameters.values()]
        return not kinds or kind in kinds

    def takes(self, name: str) -> bool:
        """Whether the step takes an argument by a name."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = (n for n, p in self.parameters.items() if p.kind not in variadic)
        return name in named or self.is_open(inspect.Parameter.VAR_KEYWORD)

    def normal(self, option: str, arguments: Iterable[int | str]) -> Arguments:
        """Arguments by number, or by name where they have no number.

        Args:
            option: What they are given for: "donate" or "static".
            arguments: Numbers and names.

        Raises:
            ArgumentError: The step has no such argument, or one is neither number nor name.
        """
        return tuple(dict.fromkeys(self._normal(option, argument) for argument in arguments))

    def _normal(self, option: str, argument: int | str) -> int | str:
        names = self.positions
        option = f"{option}_{'argnames' if isinstance(argument, str) else 'argnums'}"
        if not isinstance(argument, str) and not hasattr(argument, "__index__"):
            raise ArgumentError(
                f"{option}: expected the number of an argument of {self.name}, got {argument!r}."
            )
        if isinstance(argument, str):
            if argument in names:
                return names.index(argument)
            if argument in self.parameters or self.is_open(inspect.Parameter.VAR_KEYWORD):
                return argument
        elif -len(names) <= argument < len(names):
            return argument % len(names)
        elif self.is_open(inspect.Parameter.VAR_POSITIONAL):
            return argument
        raise ArgumentError(
            f"{option}: {self.name} has no argument {argument!r}; it takes "
            f"{', '.join(self.parameters) or 'none'}."
        )


def jitted(
    step: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
) -> Jitted:
    """A step and what ``jax.jit`` is told of it.

    What is not given is taken over from a step that ``jax.jit``, ``nnx.jit`` or ``eqx.filter_jit``
    has made.

    Raises:
        ArgumentError: The step has no such argument, or is no function.
    """
    if not callable(step):
        is_budget = isinstance(step, (str, int, float))
        advice = (
            "Give the budget after it, or by name (budget=)."
            if is_budget
            else "Give the function itself, not what a call of it returns."
        )
        raise ArgumentError(
            f"Expected a training step, a function, first; got {type(step).__name__}. {advice}"
        )
    own = _taken_apart(step)
    donate = together(donate_argnums, donate_argnames)
    static = together(static_argnums, static_argnames)
    return Jitted(
        own.fun,
        own.donate if donate is None else own.normal("donate", donate),
        own.static if static is None else own.normal("static", static),
        own.in_shardings if in_shardings is None else in_shardings,
        own.out_shardings if out_shardings is None else out_shardings,
        own.first,
        own.filtered,
    )


def several(one_or_more: Any) -> tuple[Any, ...]:
    """Numbers or names of arguments, where one alone may be given."""
    is_one = isinstance(one_or_more, str) or not isinstance(one_or_more, Iterable)
    return (one_or_more,) if is_one else tuple(one_or_more)


def together(numbers: Any, names: Any) -> Arguments | None:
    """Arguments given by number and by name; None where nothing is said."""
    if numbers is None and names is None:
        return None
    parts = (() if part is None else several(part) for part in (numbers, names))
    return tuple(argument for part in parts for argument in part)


def check_options(step: Jitted | None, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse what is neither an option nor an argument of the step.

    Args:
        step: The step, if its arguments may be among the options.
        options: What was given by name.
        known: Names of the options.

    Raises:
        ArgumentError: Names what is not known, and what it might be.
    """
    for name in options:
        if name in known or (step is not None and step.takes(name)):
            continue
        if name in _NOT_TAKEN:
            raise ArgumentError(f"jdelta does not take jax.jit's {name}: {_NOT_TAKEN[name]}.")
        whose = f" nor an argument of {step.name}" if step is not None else ""
        raise ArgumentError(f"{name!r} is no option of jdelta{whose}: {_meant(name, known, step)}")


def _meant(name: str, known: Sequence[str], step: Jitted | None) -> str:
    """What to write in place of an option that there is not."""
    if name in _ALL_ARGUMENTS and step is not None:
        return (
            "the step's arguments follow the budget, each by itself: "
            f"jdelta.plan({step.name}, budget, {', '.join(step.positions) or '*args'})."
        )
    begun = [option for option in known if option.startswith(f"{name}_")]
    close = difflib.get_close_matches(name, ("budget", *known), n=1, cutoff=_CLOSE)
    if matches := begun or close:
        return f"did you mean {matches[0]}?"
    return f"there are {', '.join(known)}."


def check_kind(step: Jitted, option: str, value: Any, kinds: Sequence[Any], expected: str) -> None:
    """Refuse what an option does not take: it may be the step's argument of that name.

    Args:
        step: The step.
        option: Name of the option.
        value: What was given for it.
        kinds: Types that it takes.
        expected: The same in words.

    Raises:
        ArgumentError: It is of another type.
    """
    if isinstance(value, tuple(kinds)):
        return
    got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    if option in step.parameters:
        raise ArgumentError(
            f"{option}= is an option of jdelta, and {step.name} has an argument of that name too: "
            f"got {got}. Give the argument by position."
        )
    raise ArgumentError(f"{option}: expected {expected}, got {got}.")


def _taken_apart(step: Callable[..., Any]) -> Jitted:
    """What ``jax.jit`` and its like were told when they made a step."""
    info = _jit_info(step)
    if info is not None:
        return _of_jit(step, info)
    if "equinox" in sys.modules:
        from jdelta._src.regions.frameworks import equinox

        filtered = equinox.filter_jitted(step)
        if filtered is not None:
            return _filtered(*filtered)
        if equinox.is_module(step):
            return Jitted(_called, first=(step,))
    if "flax.nnx" in sys.modules:
        from jdelta._src.regions.frameworks import flax

        bound = flax.bound(step)
        if bound is not None:
            return _bound(_taken_apart(bound[0]), bound[1])
    return Jitted(step)


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self(*args, **kwargs)


_JITTED: Any = type(jax.jit(_called))


def _jit_info(step: Any) -> Any:
    """What ``jax.jit`` was told of a step, also by ``nnx.jit``; None where it has not made it.

    A function that wraps a jitted one (``functools.wraps``) is no jitted one, though it has all of
    its attributes.
    """
    plain = step.jitted_fn if type(step).__module__.startswith("flax.nnx.") else step
    return plain._jit_info if isinstance(plain, _JITTED) else None


def _bound(step: Jitted, first: Sequence[Any]) -> Jitted:
    """A step whose first arguments are given already."""
    names = step.positions[: len(first)]

    def later(arguments: Arguments) -> Arguments:
        numbered = (a if isinstance(a, str) else a - len(first) for a in arguments)
        return tuple(names[a] if isinstance(a, int) and a < 0 else a for a in numbered)

    return replace(
        step,
        first=(*step.first, *first),
        donate=later(step.donate),
        static=tuple(a for a in later(step.static) if a not in names),
    )


def _of_jit(step: Any, info: Any) -> Jitted:
    inner = _taken_apart(step.__wrapped__)
    leaf_lists = info.in_shardings_leaves, info.out_shardings_leaves
    trees = info.in_shardings_treedef, info.out_shardings_treedef
    into, out = (
        None if hasattr(step, "jitted_fn") else _places(tree, leaves)
        for tree, leaves in zip(trees, leaf_lists, strict=True)
    )
    return replace(
        inner,
        donate=inner.normal("donate", (*info.donate_argnums, *info.donate_argnames)),
        static=inner.normal("static", (*info.static_argnums, *info.static_argnames)),
        in_shardings=into,
        out_shardings=out,
    )


def _places(tree: Any, leaves: Sequence[Any]) -> Any:
    """Shardings that a step was jitted with; None where it was with none."""
    said = [None if type(leaf).__name__ == "UnspecifiedValue" else leaf for leaf in leaves]
    return None if all(leaf is None for leaf in said) else tree.unflatten(said)


def _filtered(fun: Callable[..., Any], first: bool, rest: bool) -> Jitted:
    inner = _taken_apart(fun)
    count = len(inner.positions)
    donate = tuple(i for i in range(count) if (first if i == 0 else rest))
    return replace(inner, donate=donate, filtered=True)
