import dataclasses
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jdelta
from jdelta._src.backends import rates
from jdelta._src.backends.chips import CHIPS, Rates, chip_of
from jdelta._src.backends.platforms import BACKENDS, backend_of, platform_of
from jdelta._src.backends.target import _offload_refusal, published, resolve
from jdelta._src.errors import TargetError
from tests.compilers import needs_cuda

RATES = Rates(
    matmul=(("bfloat16", 4.0), ("float16", 3.0), ("float32", 2.0), ("float32 highest", 1.0)),
    vector=1.0,
    integer=0.5,
    bandwidth=8.0,
    device_to_host=0.5,
    host_to_device=0.25,
    interconnect=4.0,
    spread=0.125,
)


@pytest.fixture(autouse=True)
def timed(tmp_path, monkeypatch):
    """Replaces timing by fixed figures and tells which devices were timed."""
    monkeypatch.setenv("JDELTA_CACHE_DIR", str(tmp_path))
    devices = []
    monkeypatch.setattr(rates, "_timed", lambda device: devices.append(device) or RATES)
    return devices


def python(script, **environment):
    """Runs a script in a process of its own, warnings being errors."""
    kept = {name: value for name, value in os.environ.items() if name[:3] not in ("JAX", "TPU")}
    path = str(Path(jdelta.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def local_mesh(*shape):
    devices = np.array(jax.devices("cpu")[:1] * int(np.prod(shape))).reshape(shape)
    return Mesh(devices, [f"axis{i}" for i in range(len(shape))])


# Names and errors


@pytest.mark.parametrize("written", ["cuda:H100", "h100", "H100:1x1x8"])
def test_a_target_that_is_written_otherwise_is_told(written):
    with pytest.raises(TargetError, match="did you mean 'cuda:h100'"):
        resolve(written)


@pytest.mark.parametrize("name", ["", "gpu", "tpu:v9", "tpu:h100", "rocm:mi300", "cpu:0", "v5e"])
def test_unknown_names_list_what_exists(name):
    with pytest.raises(TargetError, match=r"tpu:v5e.*cuda:b200"):
        resolve(name)


def test_missing_libtpu_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"pip install 'jax-delta\[tpu\]'"):
        resolve("tpu:v5e:32x32")


def test_missing_cuda_plug_in_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    with pytest.raises(TargetError, match=r"pip install 'jax-delta\[cuda\]'"):
        resolve("cuda:h100:1x1x32")


def test_absent_device_points_to_ahead_of_time_names(monkeypatch):
    def absent(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", absent)
    with pytest.raises(TargetError, match=r"no tpu device is attached.*tpu:v5e"):
        resolve("tpu")


# Attached devices


def test_arguments_decide_over_the_default():
    device = jax.devices("cpu")[-1]
    target = resolve(None, {"x": jax.device_put(1.0, device), "name": "no array", "y": None})
    assert target.devices() == (device,)
    assert (target.platform, target.ahead_of_time) == ("cpu", False)


def test_shapes_with_a_sharding_count_as_arguments():
    sharding = SingleDeviceSharding(jax.devices("cpu")[0])
    assert resolve(None, jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)).name == "cpu"


def test_without_arrays_the_default_device():
    assert resolve(None, [1, None]).devices() == (jax.local_devices()[0],)


def test_cpu_shares_the_machine_and_refuses_offload():
    target = resolve("cpu")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < target.memory * len(target.devices()) <= machine
    assert "memory kinds" in target.offload_refusal
    assert hash(target) == hash(resolve("cpu"))


def test_rates_are_measured_once(timed):
    assert resolve("cpu").rates == resolve("cpu").rates == RATES
    assert resolve("cpu").rates.spread == RATES.spread
    assert len(timed) == 1


@pytest.mark.parametrize("damage", ["", "[]", '{"vector": "fast"}', '{"vector": 1.0}'])
def test_damaged_rates_are_measured_again(timed, tmp_path, damage):
    resolve("cpu")
    (record,) = (tmp_path / "rates").iterdir()
    original = record.read_text()
    record.write_text(damage or original.replace("8.0", "0.0"))
    assert resolve("cpu").rates == RATES
    assert len(timed) == 2
    assert record.read_text() == original


def test_published_rates_fill_what_was_not_measured():
    published = dataclasses.replace(RATES, matmul=(("float32", 100.0), ("int8", 9.0)))
    known = dict(rates.measured_rates(jax.devices("cpu")[0], published).matmul)
    assert (known["float32"], known["int8"]) == (2.0, 9.0)


def test_products_of_higher_precision_have_rates_of_their_own():
    tpu, gpu = (published(name).rates for name in ("tpu:v5e", "cuda:h100"))
    assert tpu.flops("float32 highest") == pytest.approx(197e12 / 6)
    assert tpu.flops("float32 high") == pytest.approx(197e12 / 3)
    assert gpu.flops("float32 highest") == gpu.vector < gpu.flops("float32")
    assert gpu.flops("float32 high") == gpu.flops("float32")
    assert tpu.flops("bfloat16 highest") == tpu.flops("bfloat16")


@pytest.mark.parametrize("asked", ["default", "highest"])
def test_rates_do_not_depend_on_the_precision_that_is_set(asked):
    seen = []
    clock = mock.Mock(seconds=lambda call: seen.append(jax.make_jaxpr(call)()) or 1.0)
    with jax.default_matmul_precision(asked):
        for kind in ("float32", "float32 highest"):
            rates._matmul(jax.devices("cpu")[0], rates._CPU, clock, kind)
    by_default, highest = map(str, seen)
    assert "HIGHEST" not in by_default
    assert "HIGHEST" in highest


def test_measuring_covers_every_rate(monkeypatch):
    monkeypatch.undo()
    sizes = rates._Sizes(matrix=32, chain=1, array=2**14, registers=2**12, each=8)
    monkeypatch.setattr(rates, "_CPU", sizes)
    timed = rates._timed(jax.devices("cpu")[0])
    assert all(rate > 0 for _, rate in timed.matmul)
    assert min(dataclasses.astuple(timed)[1:]) > 0


def test_the_spread_is_that_of_the_rate_that_varies_most(monkeypatch):
    ticks = iter([*[0, 1, 1, 3, 3, 5, 5, 6, 6, 8], *[0, 2] * 5])  # 1, 2, 2, 1, 2 s, then 2 s always
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(ticks))
    clock = rates._Clock()
    assert [clock.seconds(lambda: 0), clock.seconds(lambda: 0)] == [1, 2]
    assert clock.spread == 1.0


# The table


def test_dtypes_without_a_figure_run_at_the_rate_of_float32_or_slower():
    assert RATES.flops("bfloat16") == 4.0
    assert RATES.flops("int8") == 2.0
    assert RATES.flops("float64") == 1.0


def test_kinds_of_the_table_are_found():
    assert chip_of("TPU v5") is CHIPS["tpu"]["v5p"]
    assert chip_of("cpu") is None


@pytest.mark.parametrize(
    ("jaxlib", "refused"),
    [("0.10.2", True), ("0.11.0", True), ("0.11.1", False), ("0.12.0.1", False)],
)
def test_offload_is_refused_where_gpus_miscompile_it(monkeypatch, jaxlib, refused):
    monkeypatch.setattr("jdelta._src.backends.target.version", lambda package: jaxlib)
    assert bool(_offload_refusal(backend_of("cuda"))) is refused
    assert _offload_refusal(backend_of("tpu")) is None


def test_a_platform_that_nobody_knows_is_refused():
    with pytest.raises(TargetError, match="'rocm', only those for tpu, cuda, cpu"):
        backend_of("rocm")
    client = SimpleNamespace(platform_version="ROCm 6.4")
    assert platform_of(SimpleNamespace(platform="gpu", client=client)) == "rocm"


def test_every_backend_is_found_by_its_name():
    assert all(backend_of(name).platform == name for name in BACKENDS)


# Where arguments stand


def test_own_shardings_are_kept():
    target = resolve("cpu")
    own = NamedSharding(local_mesh(1), PartitionSpec("axis0"))
    assert target.sharding(own) is own


def test_abstract_keeps_what_is_no_array():
    tree = {"x": jnp.ones((2, 3)), "weak": jnp.asarray(1.0), "n": 3, "rate": 0.5}
    shapes = resolve("cpu").abstract(tree)
    assert (shapes["n"], shapes["rate"]) == (3, 0.5)
    assert (shapes["x"].shape, shapes["x"].dtype) == ((2, 3), jnp.float32)
    assert shapes["weak"].weak_type
    assert not shapes["x"].weak_type


def test_abstract_replicates_beside_a_mesh():
    sharded = NamedSharding(local_mesh(1), PartitionSpec("axis0"))
    shapes = resolve("cpu").abstract([jax.device_put(jnp.ones(4), sharded), np.ones(3)])
    assert shapes[0].sharding == sharded
    assert shapes[1].sharding == NamedSharding(sharded.mesh, PartitionSpec())


def test_the_devices_of_a_process_share_its_host_memory():
    target = dataclasses.replace(resolve("cpu"), host_memory=800)
    mesh = Mesh(np.array(jax.local_devices()[:4]), ["axis0"])
    cut = NamedSharding(mesh, PartitionSpec("axis0"))
    over_four = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=cut)
    assert target.host_share(target.abstract([over_four])) == 200
    assert target.host_share(target.abstract([np.ones(3)])) == 800
    assert dataclasses.replace(target, host_memory=None).host_share([over_four]) is None


@pytest.mark.compiler
def test_mesh_is_laid_over_the_topology():
    mesh = AbstractMesh((2, 2), ("data", "model"))
    like = NamedSharding(mesh, PartitionSpec("data", "model"))
    target = resolve("tpu:v5e:2x2")
    shapes = target.abstract(
        [jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=like), np.ones((8, 128), np.float32)]
    )
    assert set(shapes[0].sharding.mesh.devices.flat) == set(target.devices())
    compiled = jax.jit(lambda x, y: (x * 2, y)).lower(*shapes).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == (64 * 512 // 4 + 8 * 128) * 4


@pytest.mark.compiler
def test_mesh_larger_than_the_target_is_an_error():
    like = NamedSharding(AbstractMesh((8,), ("data",)), PartitionSpec("data"))
    with pytest.raises(TargetError, match=r"has 4 devices.*mesh of 8"):
        resolve("tpu:v5e:2x2").sharding(like)


@pytest.mark.compiler
def test_host_memory_is_kept_on_a_tpu():
    like = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    assert resolve("tpu:v5e").sharding(like).memory_kind == "pinned_host"
    assert resolve("tpu:v5e").sharding().memory_kind == "device"


@pytest.mark.compiler
@needs_cuda
def test_arguments_in_host_memory_are_an_error_where_cuda_would_drop_it():
    like = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    with pytest.raises(TargetError, match="host memory"):
        resolve("cuda:h100").sharding(like)


# Ahead of time


@pytest.mark.compiler
@pytest.mark.parametrize("chip", CHIPS["tpu"])
def test_tpu_kinds_are_those_of_the_table(chip):
    target = resolve(f"tpu:{chip}")
    assert {device.device_kind for device in target.devices()} == {target.kind}
    assert target.ahead_of_time
    assert target == resolve(target.name)


@pytest.mark.compiler
@needs_cuda
@pytest.mark.parametrize("chip", CHIPS["cuda"])
def test_cuda_kinds_are_those_of_the_table(chip):
    target = resolve(f"cuda:{chip}")
    assert {device.device_kind for device in target.devices()} == {target.kind}
    assert target.ahead_of_time
    assert target == resolve(target.name)


@pytest.mark.compiler
def test_topologies_the_compiler_does_not_know_are_named():
    with pytest.raises(TargetError, match=r"'3x3' of tpu:v5e"):
        resolve("tpu:v5e:3x3")


@pytest.mark.compiler
@needs_cuda
def test_gpu_memory_follows_the_share_that_jax_takes(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    default = resolve("cuda:h100").memory
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert default == CHIPS["cuda"]["h100"].memory * 3 // 4
    assert resolve("cuda:h100").memory == CHIPS["cuda"]["h100"].memory // 2


@pytest.mark.compiler
def test_tpu_compiler_loads_silently_and_late():
    script = """
        import os, pathlib
        from jdelta._src.backends.target import resolve
        maps = pathlib.Path("/proc/self/maps")
        before = "libtpu.so" in maps.read_text(), "TPU_WORKER_HOSTNAMES" in os.environ
        resolve("tpu:v5e")
        after = "libtpu.so" in maps.read_text(), os.environ["TPU_WORKER_HOSTNAMES"]
        print(before, after, os.environ["TPU_ACCELERATOR_TYPE"])
    """
    done = python(textwrap.dedent(script), JAX_PLATFORMS="cpu", TPU_ACCELERATOR_TYPE="v6e-4")
    assert done.stderr == ""
    assert done.stdout == "(False, False) (True, 'localhost') v6e-4\n"


@pytest.mark.compiler
@needs_cuda
@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("environment", [{}, {"JAX_PLATFORMS": "cpu"}], ids=["unset", "cpu"])
def test_cuda_compiler_works_beside_the_cpu_in_either_order(first, environment):
    script = f"""
        import os
        import jax, jax.numpy as jnp
        from jdelta._src.backends.target import resolve
        level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
        if {first!r} == "cpu":
            jnp.ones(3).block_until_ready()
        shape = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=resolve("cuda:h100").sharding())
        jax.jit(lambda x: x + 1).lower(shape).compile()
        print(jnp.ones(3).sum(), jax.devices("cpu")[0].platform)
        print(os.environ.get("TF_CPP_MIN_LOG_LEVEL") == level)
    """
    done = python(textwrap.dedent(script), **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3.0 cpu\nTrue\n"
