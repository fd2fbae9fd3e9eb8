"""How transfers are timed where the compiler leaves barriers as they are: they share one.

A copy to the host is done by the time that the other values of its barrier are used, and a fetch
does not start before they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Var


def tie(names: Sequence[Var], env: Env) -> None:
    """Put values behind one barrier: none of them is used before all of them are there."""
    names = list(dict.fromkeys(names))
    values = lax.optimization_barrier([env[v] for v in names])
    env.update(zip(names, values, strict=True))


class Barriers:
    """Copies and fetches, each behind barriers."""

    def copy(self, eqn: Eqn, env: Env) -> None:
        """Copy a value to the host, as its equation says."""
        _jax.run(eqn, env)

    def copy_after(self, value: Var, eqns: Sequence[Eqn], env: Env) -> None:
        """Start copies to the host once a value is there."""
        for eqn in eqns:
            source = eqn.invars[0]
            env[value], away = lax.optimization_barrier((env[value], env[source]))
            env[eqn.outvars[0]] = jax.device_put(away, jax.memory.Space.Host)

    def end(self, value: Var, hosts: Sequence[Var], env: Env) -> None:
        """End copies to the host by the time that a value is there."""
        tie((value, *hosts), env)

    def fetch(self, hosts: Sequence[Var], after: Sequence[Var], env: Env) -> dict[Var, Any]:
        """Fetch host values, ``after`` these values are there."""
        if after:
            tie((*after, *hosts), env)
        return {v: jax.device_put(env[v], jax.memory.Space.Device) for v in hosts}

    def fetched_value(self, v: Var, fetched: Any) -> Any:
        """The value of ``v`` as its region reads it, of what fetching it gave."""
        del v
        return fetched
