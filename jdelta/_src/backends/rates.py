"""Rates measured on the device at hand."""

import dataclasses
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.lax import Precision
from jax.sharding import SingleDeviceSharding

from jdelta._src import cache
from jdelta._src.backends.chips import Rates
from jdelta._src.backends.platforms import backend_of, platform_of
from jdelta._src.versions import version

_LOG = logging.getLogger(__name__)

Device: TypeAlias = Any
"""A ``jax.Device``, whose type JAX does not declare."""

_PRODUCTS = {
    "bfloat16": Precision.DEFAULT,
    "float16": Precision.DEFAULT,
    "float32": Precision.DEFAULT,
    "float32 highest": Precision.HIGHEST,
}
_OTHERS = ("vector", "integer", "bandwidth", "device_to_host", "host_to_device", "spread")
"""Of the fields of `Rates`; the last one is no rate."""

_REPEATS, _LEAST_SECONDS = 5, 0.1
"""How often, and how long at least, a program is timed."""


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """How much work is timed: enough to hide the launch, little enough to be quick and to fit.

    Attributes:
        matrix: Rows and columns of the matrix products.
        chain: Products in one program.
        array: Bytes of the array that is read, written and moved.
        registers: Bytes of the array whose elements are worked on in registers.
        each: Operations on each of them.
    """

    matrix: int
    chain: int
    array: int
    registers: int
    each: int


_CPU = _Sizes(matrix=512, chain=2, array=2**25, registers=2**21, each=128)
_ACCELERATOR = _Sizes(matrix=4096, chain=16, array=2**28, registers=2**27, each=512)


def measured_rates(device: Device, published: Rates | None) -> Rates:
    """What this kind of device does, timed once and then kept on disk.

    In a job of several processes all take the first one's figures, so that all make the same plan.

    Args:
        device: Any device of the kind; one of this process is timed.
        published: Figures for the dtypes and the links that are not timed.
    """
    local = jax.local_devices(backend=device.client.platform)[0]
    name = cache.key(
        "quickest, at the precision named",  # how they are timed: others would not compare
        device.device_kind,
        version("jaxlib"),
        platform.machine(),
        str(os.cpu_count()),
    )
    rates = _known(name)
    if rates is None:
        _LOG.info("measuring how fast %s is", device.device_kind)
        rates = _timed(local)
        _LOG.info("repeats of one rate lie up to %.0f %% apart", 100 * rates.spread)
        cache.write("rates", name, dict(zip(_fields(), _flat(rates), strict=True)))
    if jax.process_count() > 1:
        rates = _unflat(multihost_utils.broadcast_one_to_all(np.array(_flat(rates))).tolist())
    known = dict(published.matmul) if published else {}
    return dataclasses.replace(
        rates,
        matmul=tuple(sorted({**known, **dict(rates.matmul)}.items())),
        # On a CPU every device is a part of the machine: an exchange is a copy in its memory.
        interconnect=published.interconnect if published else rates.bandwidth / 2,
    )


def _fields() -> list[str]:
    return [*_PRODUCTS, *_OTHERS]


def _flat(rates: Rates) -> list[float]:
    others = (getattr(rates, field) for field in _OTHERS)
    return [*(rate for _, rate in rates.matmul), *others]


def _unflat(values: Sequence[float]) -> Rates:
    figures = dict(zip(_fields(), values, strict=True))
    matmul = tuple((kind, figures.pop(kind)) for kind in _PRODUCTS)
    return Rates(matmul, **figures)


def _known(name: str) -> Rates | None:
    record = cache.read("rates", name) or {}
    figures = [value for value in map(record.get, _fields()) if isinstance(value, float)]
    if len(figures) < len(_fields()):
        return None
    rates = _unflat(figures)
    return rates if min(figures[:-1]) > 0 <= rates.spread else None


def _has_own_memory(device: Device) -> bool:
    return backend_of(platform_of(device)).devices.have_own_memory


class _Clock:
    """Times programs.

    Attributes:
        spread: How much longer than the least time the median was, where that is most.
    """

    def __init__(self):
        self.spread = 0.0

    def seconds(self, call: Callable[[], object]) -> float:
        """The quickest of several calls, after one that compiles and allocates.

        What else runs on the machine only ever makes a call slower.
        """
        jax.block_until_ready(call())
        times: list[float] = []
        while len(times) < _REPEATS or sum(times) < _LEAST_SECONDS:
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
        least = min(times)
        self.spread = max(self.spread, statistics.median(times) / least - 1)
        return least


def _timed(device: Device) -> Rates:
    sizes = _ACCELERATOR if _has_own_memory(device) else _CPU
    clock = _Clock()
    bandwidth = _bandwidth(device, sizes, clock)
    to_host, to_device = _link(device, sizes, clock) or (bandwidth / 2, bandwidth / 2)
    return Rates(
        matmul=tuple((kind, _matmul(device, sizes, clock, kind)) for kind in _PRODUCTS),
        vector=_vector(device, sizes, clock),
        integer=_integer(device, sizes, clock),
        bandwidth=bandwidth,
        device_to_host=to_host,
        host_to_device=to_device,
        spread=clock.spread,
    )


def _matmul(device: Device, sizes: _Sizes, clock: _Clock, kind: str) -> float:
    """FLOP/s of a chain of square products, the weights scaled so that nothing overflows."""
    n, precision = sizes.matrix, _PRODUCTS[kind]
    weights = np.random.default_rng(0).standard_normal((n, n), np.float32) / n**0.5
    x = jax.device_put(jnp.asarray(weights, kind.partition(" ")[0]), device)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(sizes.chain):
            y = jnp.matmul(y, x, precision=precision)
        return y

    return 2 * n**3 * sizes.chain / clock.seconds(partial(chain, x))


def _vector(device: Device, sizes: _Sizes, clock: _Clock) -> float:
    """FLOP/s of multiply-adds on values that stay in registers."""
    steps = sizes.each
    x = _array(device, sizes.registers)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = x * x + 0.25
        return x

    return 2 * steps * x.size / clock.seconds(partial(chain, x))


def _integer(device: Device, sizes: _Sizes, clock: _Clock) -> float:
    """Operations/s on integers that stay in registers, as random bits are made of."""
    steps = sizes.each // 2
    x = _array(device, sizes.registers).view(jnp.uint32)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = (x ^ (x >> 7)) + 0x1E3779B9
        return x

    return 3 * steps * x.size / clock.seconds(partial(chain, x))


def _bandwidth(device: Device, sizes: _Sizes, clock: _Clock) -> float:
    """Bytes/s read and written by passes over one array, so that allocating it hardly counts."""
    passes = 16
    x = _array(device, sizes.array)

    def once(_: int, x: jax.Array) -> jax.Array:
        return x * x + 0.25

    @jax.jit
    def sweep(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, passes, once, x)

    return 2 * passes * x.nbytes / clock.seconds(partial(sweep, x))


def _link(device: Device, sizes: _Sizes, clock: _Clock) -> tuple[float, float] | None:
    """Bytes/s to pinned host memory and back; ``None`` where the host's memory is the device's."""
    if not _has_own_memory(device):
        return None
    on_device = SingleDeviceSharding(device)
    x = _array(device, sizes.array)
    on_host = on_device.with_memory_kind("pinned_host")
    host = jax.device_put(x, on_host)
    away = clock.seconds(partial(jax.device_put, x, on_host))
    back = clock.seconds(partial(jax.device_put, host, on_device))
    return x.nbytes / away, x.nbytes / back


def _array(device: Device, size: int) -> jax.Array:
    return jax.device_put(jnp.full(size // 4, 0.5, jnp.float32), device)
