"""One plan on all processes of a job: what they agree about, and that all learn if one fails.

Each process of a job plans for itself, and all have to come to the same program: one that had other
rates, or another budget, would compile another one, and wait for ever for the others' part in it.
So they tell each other what a plan depends on besides the program, and what they came to. Both are
told in the same order whatever is planned, so that none waits for what another does not tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdelta._src import _jax, errors
from jdelta._src.backends.chips import Rates
from jdelta._src.errors import JdeltaError, PlanMismatchError
from jdelta._src.sizes import Budget
from jdelta._src.spill import SpillRates

PATIENCE = 1.0
"""Seconds to wait for a process before asking whether another one has failed."""

SOON, LATEST = 60.0, 3600.0
"""Seconds after which it is said which process is waited for, and after which planning fails."""

_LOG = logging.getLogger(__name__)

_ROUNDS: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
"""How many plans were made together, by the processes that they were for."""


@dataclass(frozen=True)
class Terms:
    """What a plan depends on that processes may measure, or be asked, differently.

    Attributes:
        budget: The budget.
        host_room: Bytes that may be offloaded; infinite where that is not known.
        rates: Those of the devices.
        spill: Those of files, where values may be spilled.
    """

    budget: Budget
    host_room: float
    rates: Rates
    spill: SpillRates | None = None

    @classmethod
    def read(cls, text: str) -> Terms:
        """Those that were written."""
        fields: dict[str, Any] = json.loads(text)
        rates = fields["rates"] | {"matmul": tuple(map(tuple, fields["rates"]["matmul"]))}
        spill = fields["spill"]
        return cls(
            Budget(**fields["budget"]),
            fields["host_room"],
            Rates(**rates),
            SpillRates(**spill) if spill else None,
        )

    @property
    def text(self) -> str:
        """These as a text."""
        return json.dumps(dataclasses.asdict(self))


def common(terms: Sequence[Terms]) -> Terms:
    """What all processes plan with: the least of each, and the devices' rates of the first.

    Args:
        terms: Those of each process.

    Raises:
        PlanMismatchError: They are not of one kind.
    """
    first, budgets = terms[0], [t.budget for t in terms]
    if len({(t.budget.bytes is None, t.spill is None) for t in terms}) > 1:
        raise PlanMismatchError(
            "The processes of the job were asked for different plans: a budget in bytes and a "
            "share, or spill= on some only. Give all of them the same arguments."
        )
    spills = [t.spill for t in terms if t.spill]
    return Terms(
        min(budgets, key=lambda b: (b.bytes or 0, b.share or 0.0)),
        min(t.host_room for t in terms),
        first.rates,
        SpillRates(min(s.write for s in spills), min(s.read for s in spills)) if spills else None,
    )


class Job:
    """The processes that one plan is for.

    Attributes:
        processes: Their numbers, in order: ``(0, 1)``.
        here: The number of this one.
    """

    def __init__(self, processes: Iterable[int], here: int):
        self.processes = tuple(sorted(set(processes)))
        self.here = here
        self._round = next(_ROUNDS[self.processes]) if self.is_shared else 0

    @classmethod
    def of(cls, devices: Iterable[Any], *, ahead_of_time: bool) -> Job:
        """The processes that have some devices; this one alone for devices that are not there."""
        here = jax.process_index()
        return cls([here] if ahead_of_time else [d.process_index for d in devices], here)

    @property
    def is_shared(self) -> bool:
        """Whether there is another process, and the plan is for this one too."""
        return len(self.processes) > 1 and self.here in self.processes

    def common(self, terms: Terms) -> Terms:
        """What all processes plan with.

        Raises:
            PlanMismatchError: They were asked for different plans.
            JdeltaError: Another process has failed.
        """
        return common([Terms.read(text) for text in self._told("terms", terms.text)])

    def check_alike(self, plan: str) -> None:
        """Check that all came to the same plan, given as a text.

        Raises:
            PlanMismatchError: Not all did.
            JdeltaError: Another process has failed.
        """
        plans = self._told("plan", plan)
        others = [p for p, text in zip(self.processes, plans, strict=True) if text != plan]
        if others:
            raise PlanMismatchError(
                f"Process {self.here} of the job has another plan than process {others[0]}. Give "
                "all of them the same step, arguments and options, and the same versions of jdelta "
                "and JAX."
            )

    @contextlib.contextmanager
    def failing_together(self) -> Generator[None]:
        """Tell the others if planning fails here."""
        try:
            yield
        except Exception as error:
            if self.is_shared:
                failure = json.dumps([type(error).__name__, str(error)])
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody is left to hear it
                    _jax.tell(self._key("failed", self.here), failure)
            raise

    def _told(self, topic: str, mine: str) -> list[str]:
        """What each process tells about a topic, in their order."""
        if not self.is_shared:
            return [mine]
        _jax.tell(self._key(topic, self.here), mine)
        return [self._wait(topic, process) for process in self.processes]

    def _wait(self, topic: str, process: int) -> str:
        begin, is_said = time.monotonic(), False
        while (text := _jax.heard(self._key(topic, process), PATIENCE)) is None:
            for other in self.processes:
                if failure := _jax.heard(self._key("failed", other)):
                    raise _failure(other, *json.loads(failure))
            waited = time.monotonic() - begin
            if waited > LATEST:
                raise JdeltaError(
                    f"Process {process} of the job did not plan the step within an hour. Its "
                    "devices are in the mesh, so it has to make the same plan, or load it."
                )
            if waited > SOON and not is_said:
                _LOG.warning("waiting for process %d of the job to plan the same step", process)
                is_said = True
        return text

    def _key(self, topic: str, process: int) -> str:
        name = "-".join(map(str, self.processes))
        return f"jdelta/{name}/{self._round}/{topic}/{process}"


def _failure(process: int, kind: str, message: str) -> JdeltaError:
    """What another process failed with, for this one to raise."""
    known = getattr(errors, kind, None)
    said = message if known else f"{kind}: {message}"
    return (known or JdeltaError)(f"Planning failed on process {process} of the job. {said}")
