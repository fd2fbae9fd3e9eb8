"""A plan: what becomes of every residual of a step, and what the compiler says of it."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import Primitive

from jdelta._src.backends.target import attached
from jdelta._src.errors import ArgumentError, PlanMismatchError, SpillError, TargetError
from jdelta._src.hlo.overlap import Overlap
from jdelta._src.plan import file
from jdelta._src.plan.call import Call
from jdelta._src.plan.planned_step import PlannedStep
from jdelta._src.plan.record import PlanRecord
from jdelta._src.plan.user_step import Arguments, Jitted, jitted, together
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import Grouping
from jdelta._src.report.explain import Explanation, explain
from jdelta._src.report.export import export
from jdelta._src.report.figures import in_one_line
from jdelta._src.report.page import page
from jdelta._src.report.pictures import Picture, picture
from jdelta._src.report.printed import printed
from jdelta._src.report.rok import RokPoint
from jdelta._src.report.terminal import WIDTH
from jdelta._src.residuals.residual import Residual
from jdelta._src.spill import Spill, SpillRates

_NO_PLANS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Plan(PlanRecord):
    """What becomes of every residual of a training step, and the checked result of compiling it.

    A plan made with ``per_layer=False`` is a ``jax.checkpoint`` policy: pass it as ``policy=`` to
    ``jdelta.remat``, ``jax.checkpoint``, ``nn.remat`` or ``nnx.remat`` around regions marked with
    ``jdelta.remat``. It is immutable and hashable; plans that came out alike are
    equal.

    Attributes:
        question: What was asked: budget, target, solver, pins, bounds on other memories.
        program: Which program was planned.
        answer: What is done with each residual: policy, grouping of loops.
        figures: What the step takes so: peaks, bytes elsewhere, seconds.
        search: How the answer was found: floor, ceiling, how it ended.
    """

    _step: Jitted | None = field(default=None, repr=False, compare=False)
    _call: Call | None = field(default=None, repr=False, compare=False)
    _compiled: Any = field(default=None, repr=False, compare=False)
    _compile: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def policy(self) -> Policy | None:
        """The decisions as a policy; None when the plain step fits the budget."""
        return self.answer.policy

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """The step's residuals, in the order of the forward pass."""
        return self.answer.residuals

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """From regions' names while tracing to their names here."""
        return self.answer.aliases

    @property
    def grouping(self) -> Grouping:
        """How the planned loops over layers are run.

        With several layers in an iteration these have decisions of their own (every second, every
        third...), or are under one more checkpoint (``nested``).
        """
        return self.answer.grouping

    @property
    def updates_moved(self) -> int:
        """Bytes by which the compiled peak is lower for weight updates inside the backward loops.

        0 where the updates stay where they are.
        """
        return self.answer.updates_moved

    @property
    def budget(self) -> int:
        """Bound on the peak per device of the whole compiled step, bytes."""
        return self.question.budget

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.question.target

    @property
    def donate_argnums(self) -> Arguments:
        """Arguments whose buffers the results may take, as compiled.

        By number, or by name where they have no number.
        """
        return self.question.donate_argnums

    @property
    def static(self) -> Arguments:
        """Arguments that are constants of the program, by number or name."""
        return self.question.static

    @property
    def spill(self) -> Spill | None:
        """Where spilled values go; None if there is no such place."""
        return self.question.spill

    @property
    def fingerprint(self) -> str:
        """Digest of the plain program the plan was made for."""
        return self.program.fingerprint

    @property
    def arguments(self) -> tuple[str, ...]:
        """Path, dtype, shape and sharding of each array among the arguments."""
        return self.program.arguments

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Of ``jdelta``, ``jax`` and ``jaxlib`` that made the plan."""
        return self.program.versions

    @property
    def predicted_peak(self) -> int:
        """Peak predicted before this plan was compiled, bytes per device."""
        return self.figures.predicted_peak

    @property
    def compiled_peak(self) -> int:
        """Peak of the compiled program, bytes per device, as the target's compiler gives it.

        Arguments, results and temporaries, less aliasing; on a CPU with it what is in memory on its
        way to files.
        """
        return self.figures.compiled_peak

    @property
    def code_bytes(self) -> int:
        """Bytes of the compiled program itself, as its compiler gives them.

        A TPU has them in device memory too, beside ``compiled_peak``. (Its compiler writes shorter
        code where memory is short.)
        """
        return self.figures.code_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in pinned host memory in the compiled program.

        What is offloaded, and arguments and results that live there.
        """
        return self.figures.host_bytes

    @property
    def spill_bytes(self) -> int:
        """Bytes per device that a step holds in files at once."""
        return self.figures.spill_bytes

    @property
    def spill_written(self) -> int:
        """Bytes per device that a step writes to files.

        In loops around the gradient that is more than it holds at once.
        """
        return self.figures.spill_written

    @property
    def spill_rates(self) -> SpillRates | None:
        """Bytes per second written and read in files when the plan was made."""
        return self.figures.spill_rates

    @property
    def overlap(self) -> Overlap:
        """What the compiled schedule hides of the transfers, by the target's rates."""
        return self.figures.overlap

    @property
    def overhead(self) -> float:
        """Predicted seconds that the plan adds to a step.

        Those of recompute, and of transfers as far as the compiled schedule exposes them. Zero
        where recompute is predicted to take less than keeping everything, as in loops on GPUs: no
        plan claims to be quicker than the plain step.
        """
        return self.figures.overhead

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the plain step."""
        return self.figures.step_seconds

    @property
    def overhead_share(self) -> float:
        """Predicted overhead as a part of the plain step."""
        return self.figures.overhead_share

    @property
    def undone(self) -> tuple[str, ...]:
        """Names of residuals with which the compiled program does otherwise.

        It keeps them though the plan recomputes them, or computes them again though the plan keeps
        them; found by the marks that named values have in its text.
        """
        return self.figures.undone

    @property
    def floor(self) -> int:
        """Least peak that recompute reaches, bytes.

        That of the plain step where the plain step fits.
        """
        return self.search.floor

    @property
    def ceiling(self) -> int:
        """Peak of the plain step, bytes."""
        return self.search.ceiling

    @property
    def estimates(self) -> tuple[str, ...]:
        """Which of ``floor`` and ``ceiling`` are predictions.

        Finding the plan took no compile of theirs. The floor in a ``BudgetError`` is always
        compiled.
        """
        return self.search.estimates

    @property
    def result(self) -> str:
        """How the search ended, and what to do about it."""
        return self.search.result

    @property
    def compiles(self) -> int:
        """Programs compiled to find the plan, those known from the disk cache included."""
        return self.search.compiles

    def __call__(self, prim: Any, /, *avals: Any, **params: Any) -> Any:
        """What ``jax.checkpoint`` is to do with the results of an equation.

        Raises:
            ArgumentError: The plan was called as if it were the step.
        """
        if not isinstance(prim, Primitive):
            raise ArgumentError(
                f"Expected an equation that jax.checkpoint asks about, got {type(prim).__name__}. "
                "A plan is a policy, jax.checkpoint(f, policy=plan), not the step: plan.jit() "
                "returns the step, to be called with its arguments."
            )
        if self.policy is None:
            return jax.checkpoint_policies.everything_saveable(prim, *avals, **params)
        self._check_without_files(self.policy)
        self._check_not_nested()
        return self.policy(prim, *avals, **params)

    @property
    def writes_bits(self) -> bool:
        """Whether random bits are to be written to memory before they are read."""
        return self.policy is not None and self.policy.writes_bits

    def check_before_jvp(self, region: str) -> None:
        """Refuse to decide about a region of which only the plan knows what is differentiated.

        Raises:
            PlanMismatchError: Other values than the planned ones might have their names.
            SpillError: The plan spills, and no policy can.
        """
        if self.policy is not None:
            self._check_without_files(self.policy)
            self.policy.check_before_jvp(region)

    def check_reaches(self, block: str) -> None:
        """Refuse to be the policy of a ``jax.checkpoint`` in which no region is.

        Args:
            block: What is in it, for messages.

        Raises:
            PlanMismatchError: The plan keeps something, which would be dropped there.
        """
        if self.policy is not None:
            self.policy.check_reaches(block)

    @staticmethod
    def _check_without_files(policy: Policy) -> None:
        if policy.spilled:
            raise SpillError(
                f"The plan spills {len(policy.spilled)} values, which a jax.checkpoint policy "
                "cannot do. Use plan.jit or jdelta.jit, or plan without spill=."
            )

    def _check_not_nested(self) -> None:
        if self.answer.nesting:
            raise PlanMismatchError(
                f"The plan {self.answer.nesting}, which a jax.checkpoint policy cannot do: it "
                "would take more memory than planned. Use plan.jit or jdelta.jit, or plan with a "
                "larger budget (for layers of a scan, with per_layer=False)."
            )

    def prevents_cse(self, region: str) -> bool:
        """Whether recompute in ``region`` must be shielded from CSE."""
        return self.policy is None or self.policy.prevents_cse(region)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; compiled now, once, if its figures came from the disk cache.

        Raises:
            BudgetError: Compiled now it takes more than was measured, and more than the budget.
            PlanMismatchError: The plan was loaded from a file; ``jit`` compiles it.
        """
        if self._compiled is not None:
            return self._compiled
        if self._compile is None:
            raise PlanMismatchError(
                "A plan loaded from a file has no compiled step. Give the step to "
                "plan.jit(step_fn) and call the result."
            )
        return self._compile()

    def jit(
        self,
        step_fn: Callable[..., Any] | None = None,
        *,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Sequence[str] | None = None,
    ) -> PlannedStep:
        """The step under this plan, like ``jax.jit(step_fn)``.

        Args:
            step_fn: The step, for a plan that was loaded from a file; default: the step that was
                planned. Of a step that ``jax.jit`` has made its shardings are taken over.
            donate_argnums: As in ``jax.jit``; default: as planned, which needs no new compilation.
            donate_argnames: As in ``jax.jit``.

        Returns:
            A function with the signature of the step, for arguments of the planned shapes.

        Raises:
            TargetError: The plan was made for devices that are not here.
            PlanMismatchError: A loaded plan without ``step_fn``; and, when the result is called,
                arguments or a program that the plan was not made for.
            BudgetError: With other donation than planned the step is over the budget; or compiled
                now it is, where its figures came from the disk cache.
        """
        step = self._step if step_fn is None else jitted(step_fn)
        if step is None:
            raise PlanMismatchError(
                "A plan loaded from a file does not contain the step: call plan.jit(step_fn)."
            )
        if not attached(self.target):
            raise TargetError(
                f"The plan was made for {self.target}, which is not attached to this machine. Save "
                "it with plan.save(path), and on the machine that trains call "
                "jdelta.load(path).jit(step_fn)."
            )
        donated = together(donate_argnums, donate_argnames)
        donate = self.donate_argnums if donated is None else step.normal("donate", donated)
        own = self._step if self._step is not None and step.fun is self._step.fun else None
        step = replace(own or step, donate=donate, static=self.static)
        planned = self._call if own else None
        runs = planned and ":" not in self.target and donate == self.donate_argnums
        ready = self.compiled if runs else None
        return PlannedStep(self, step, planned.static if planned else None, ready)

    def save(self, path: str) -> None:
        """Write the plan to ``path`` as JSON, to be read by ``jdelta.load``.

        The file is described by a JSON Schema, ``jdelta/_src/plan/plan.schema.json``.

        Raises:
            SpillError: The plan spills to an adapter that is an object, which no file can hold.
        """
        file.save(self, path)

    def explain(self, name: str) -> tuple[Explanation, ...]:
        """Why the plan decides as it does about a residual, and what would change that.

        Args:
            name: The name of a residual, or a pattern such as ``"h/mlp/*"``.

        Returns:
            One explanation for residuals that are alike.

        Raises:
            PlanMismatchError: No residual has such a name.
        """
        return explain(self, name)

    def export(self, form: str) -> str:
        """The plan in the words of another library, as far as values have the user's own names.

        Args:
            form: ``"jax"`` (``save_and_offload_only_these_names``), ``"maxtext"``, ``"levanter"``
                or ``"axlearn"``.

        Returns:
            Text; what that library will compute again though the plan keeps it is in comments.

        Raises:
            ValueError: No such form.
            PlanMismatchError: The plan cannot be said in its words.
        """
        return export(self, form)

    def report(
        self, path: str, *, others: Mapping[str, Plan] = _NO_PLANS, rok: Sequence[RokPoint] = ()
    ) -> None:
        """Write one self-contained HTML page: figures, advice, pictures, every residual.

        A plan that transfers is compiled once more if its figures came from the disk cache. A plan
        that was loaded from a file has no step, so the pictures of the step are left out.

        Args:
            path: File to write.
            others: Further plans to compare it with (hand policies, other budgets), by name.
            rok: Measured runs, to draw throughput over activation memory.
        """
        shown = picture(self, self._call) if self._call is not None else None
        text = page(self, shown, others, rok)
        Path(path).write_text(text, encoding="utf-8")

    def picture(self) -> Picture:
        """What pictures of the plan show, as records: for ``jdelta.plot``, or one's own drawing.

        Raises:
            PlanMismatchError: The plan was loaded from a file, so it has no step.
        """
        if self._call is None:
            raise PlanMismatchError(
                "A plan loaded from a file has no step to make a picture of. Plan the step again; "
                "that takes no compile while the measurements are cached."
            )
        return picture(self, self._call)

    def _repr_html_(self) -> str:
        """What a notebook shows: the plan as it is printed, and folded below it the page.

        Without pictures of the step, which take a trace.
        """
        content = html.escape(page(self, None, {}))
        return (
            f"<pre>{html.escape(str(printed(self, WIDTH)))}</pre>"
            "<details><summary>all figures and residuals</summary>"
            f'<iframe srcdoc="{content}" loading="lazy" '
            'style="width:100%;height:32rem;border:0"></iframe></details>'
        )

    def __str__(self) -> str:
        """Whether it fits and what it costs, its table, and its figures for the whole step.

        In the terminal's width, and in no more lines than a terminal shows at once.
        """
        return str(printed(self))

    def __repr__(self) -> str:
        """The plan in a line."""
        return f"<jdelta.Plan: {in_one_line(self)}>"


def load(path: str) -> Plan:
    """Read a plan written by ``Plan.save``; nothing is solved or compiled for that.

    ``plan.jit(step_fn)`` of what is returned compiles the step under the same decisions, and
    refuses another program, other arguments, or a peak over the budget. Another version of JAX
    than the plan was made with is none of these, unless it stages the step as another program.

    Args:
        path: The file.

    Raises:
        PlanMismatchError: The file is no plan, damaged, or of a version that is not understood.
    """
    return file.load(path, Plan)
