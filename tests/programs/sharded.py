"""The same stack over several devices, as `tests/parallel.py` cuts it."""

from tests.parallel import PARALLEL
from tests.programs.table import program


def over_devices(name, remat):
    parallel = PARALLEL[name]
    return parallel.step(remat), parallel.arguments()


@program(units=True, large=None)
def data_parallel(size, remat):
    return over_devices("data", remat)


@program(units=True, large=None)
def tensor_parallel(size, remat):
    return over_devices("tensor", remat)


@program(units=True, large=None)
def fully_sharded(size, remat):
    return over_devices("fsdp", remat)


@program(units=True, large=None)
def expert_parallel(size, remat):
    return over_devices("expert", remat)


@program(units=True, large=None)
def mapped_by_hand(size, remat):
    return over_devices("shard_map", remat)


@program(units=True, large=None)
def step_in_a_shard_map(size, remat):
    return over_devices("shard_map step", remat)
