import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jdelta
from jdelta._src import cache
from jdelta._src.backends.platforms import backend_of
from jdelta._src.backends.target import Target, resolve
from jdelta._src.hlo.measure import _peak, measure, needed_bytes
from tests.compilers import needs_cuda

MIB = 2**20


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("JDELTA_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def records(directory):
    """The files of the measurements kept so far."""
    return lambda: sorted((directory / "measurements").glob("*"))


def lower(target: Target, fun, *shapes, **options):
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=target.sharding()) for s in shapes]
    return jax.jit(fun, **options).lower(*args)


@pytest.fixture(scope="session")
def cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDELTA_CACHE_DIR", str(tmp_path_factory.mktemp("rates")))
        return resolve("cpu")


@pytest.fixture
def elsewhere(cpu):
    """A target that is compiled for ahead of time and needs no extra: this CPU under a name."""
    return dataclasses.replace(cpu, name="cpu:elsewhere", ahead_of_time=True)


# What is measured


def test_known_bytes_on_cpu(cpu):
    lowered = lower(cpu, lambda x, y: (x + y, x[0, 0]), (1024, 1024), (1024, 1024))
    compiled, measurement = measure(lowered, cpu)
    assert compiled is not None
    assert measurement.arguments == 8 * MIB
    assert 0 <= measurement.outputs - 4 * MIB < 1024
    assert (measurement.aliased, measurement.host, measurement.refused) == (0, 0, False)
    assert measurement.peak == 8 * MIB + measurement.outputs + measurement.temporaries


def test_peak_on_cpu_holds_temporaries(cpu):
    lowered = lower(cpu, lambda x: jnp.sort(jnp.sin(x) @ x).sum(), (1024, 1024))
    _, measurement = measure(lowered, cpu)
    assert measurement.temporaries >= 4 * MIB
    assert measurement.peak >= 8 * MIB


def test_donated_arguments_are_counted_once(cpu):
    lowered = lower(cpu, lambda x: x + 1, (1024, 1024), donate_argnums=0)
    _, measurement = measure(lowered, cpu)
    assert measurement.aliased == 4 * MIB
    assert measurement.peak == 4 * MIB


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["tpu:v5e", pytest.param("cuda:h100", marks=needs_cuda)])
def test_known_bytes_ahead_of_time(name):
    target = resolve(name)
    lowered = lower(target, lambda x, w: x @ w + x, (4096, 4096), (4096, 4096), donate_argnums=0)
    compiled, measurement = measure(lowered, target)
    assert compiled is not None
    assert measurement.arguments == 128 * MIB
    assert 0 <= measurement.outputs - 64 * MIB < MIB
    assert measurement.aliased == 64 * MIB
    assert 128 * MIB <= measurement.peak <= 128 * MIB + measurement.temporaries + MIB
    if target.platform == "cuda":  # whose instructions are read though nothing is transferred
        product = 2 * 4096**3 / target.rates.flops("float32")
        assert product <= measurement.overlap.seconds <= 1.25 * product  # and the sum


@pytest.mark.full_effort
@pytest.mark.compiler
def test_values_on_the_tpu_chip_are_no_device_memory():
    def loss(x, ws):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        return jax.lax.scan(layer, x, ws)[0].sum()

    target = resolve("tpu:v5e")
    lowered = lower(target, lambda x, ws: jax.grad(loss, 1)(x, ws), (64, 512), (12, 512, 512))
    _, measurement = measure(lowered, target)
    assert measurement.arguments + measurement.outputs <= measurement.peak < 25 * MIB


@pytest.mark.compiler
def test_results_in_host_memory_are_reported_apart():
    target = resolve("tpu:v5e")
    host = target.sharding().with_memory_kind("pinned_host")
    _, measurement = measure(
        lower(target, lambda x: x + 1, (4096, 4096), out_shardings=host), target
    )
    assert (measurement.host_outputs, measurement.outputs) == (64 * MIB, 0)


@pytest.mark.parametrize(
    ("platform", "reported", "allocated", "peak"),
    [
        ("cpu", 100, None, 160),  # leaves temporaries out
        ("cuda", 150, None, 160),  # leaves gaps between buffers out
        ("tpu", 150, None, 150),  # the sum counts a buffer that is never allocated
        ("tpu", 900, None, 160),  # counts values on the chip
        ("tpu", 900, 162, 162),
    ],
)
def test_peak_is_what_the_compiler_allocates(platform, reported, allocated, peak):
    stats = SimpleNamespace(peak_memory_in_bytes=reported)
    if allocated is not None:
        stats.total_allocation_bytes = allocated
    assert _peak(stats, 160, backend_of(platform).reading) == peak


# Refusals


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (15.76G) exceeds available HBM (15.75G).",
            round(15.76 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran "
            "out of memory in memory space hbm. Used 2.08G of 2.08G hbm. Exceeded hbm capacity",
            round(2.08 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (896.00M) exceeds available HBM (400.00M).",
            896 * MIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 130.00M of 128.00M "
            "vmem. Exceeded vmem capacity by 2.00M.",
            None,
        ),
        ("INTERNAL: Ran out of memory in memory space hbm. Used 2.08G of 2.08G hbm.", None),
    ],
)
def test_refusals_are_read(message, needed):
    assert needed_bytes(message) == needed


@pytest.mark.compiler
def test_tpu_refuses_what_does_not_fit_and_the_refusal_is_kept():
    target = resolve("tpu:v5e")
    lowered = lower(target, lambda x: x + 1, (3 * 2**30 // 1024, 1024))
    compiled, measurement = measure(lowered, target)
    assert compiled is None
    assert measurement.refused
    assert measurement.peak == 24 * 2**30 > target.memory
    assert measure(lowered, target) == (None, measurement)


@pytest.mark.compiler
def test_hard_limit_of_the_tpu_compiler_refuses():
    target = resolve("tpu:v5e")
    lowered = lower(target, lambda x: x + 1, (4096, 4096))
    _, free = measure(lowered, target)
    _, limited = measure(lowered, target, {"xla_tpu_max_hbm_size_mib": "100"})
    assert (free.refused, limited.refused) == (False, True)
    assert abs(free.peak - limited.peak) < MIB


@pytest.mark.compiler
@needs_cuda
def test_cuda_compiles_what_does_not_fit():
    target = resolve("cuda:h100")
    compiled, measurement = measure(lower(target, lambda x: x + 1, (2**25, 1024)), target)
    assert compiled is not None
    assert measurement.peak == 2**38 > target.memory
    assert not measurement.refused


def test_other_failures_of_the_compiler_are_raised(elsewhere, records):
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        measure(lower(elsewhere, jnp.sin, (8,)), elsewhere, {"xla_no_such_option": "1"})
    assert records() == []


# The cache


def test_second_measurement_comes_from_disk(elsewhere):
    compiled, first = measure(lower(elsewhere, jnp.sin, (8,)), elsewhere)
    recompiled, second = measure(lower(elsewhere, jnp.sin, (8,)), elsewhere)
    assert compiled is not None
    assert recompiled is None
    assert second == first


def test_executable_is_compiled_when_wanted(elsewhere):
    lowered = lower(elsewhere, jnp.sin, (8,))
    measure(lowered, elsewhere)
    compiled, measurement = measure(lowered, elsewhere, executable=True)
    assert compiled is not None
    assert float(compiled(jnp.zeros(8)).sum()) == 0
    assert measurement.peak > 0


def test_attached_devices_of_another_machine_have_records_of_their_own(cpu, monkeypatch):
    measure(lower(cpu, jnp.sin, (8,)), cpu)
    assert measure(lower(cpu, jnp.sin, (8,)), cpu)[0] is None
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    assert measure(lower(cpu, jnp.sin, (8,)), cpu)[0] is not None


def test_programs_of_several_processes_are_compiled_by_all(cpu, records, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for _ in range(2):
        assert measure(lower(cpu, jnp.sin, (8,)), cpu)[0] is not None
    assert records() == []


def test_place_in_the_source_does_not_matter(elsewhere, records):
    source = "def step(x):\n    return x * 2 + 1\n"
    for text, file in [(source, "one.py"), ("\n\n" + source, "two.py")]:
        scope = {}
        exec(compile(text, file, "exec"), scope)
        measure(lower(elsewhere, scope["step"], (8,)), elsewhere)
    assert len(records()) == 1


@pytest.mark.parametrize(
    "change", ["program", "shape", "donation", "target", "options", "flags", "version", "setting"]
)
def test_every_part_of_the_key_counts(elsewhere, records, monkeypatch, change):
    measure(lower(elsewhere, jnp.sin, (8,)), elsewhere)
    fun, shape, options, compiler_options = jnp.sin, (8,), {}, {}
    match change:
        case "program":
            fun = jnp.cos
        case "shape":
            shape = (9,)
        case "donation":
            options = {"donate_argnums": 0}
        case "target":
            elsewhere = dataclasses.replace(elsewhere, name="cpu:somewhere")
        case "options":
            compiler_options = {"xla_cpu_enable_fast_math": True}
        case "flags":
            flags = os.environ.get("XLA_FLAGS", "")
            monkeypatch.setenv("XLA_FLAGS", flags + " --xla_dump_max_hlo_modules=1")
        case "version":
            monkeypatch.setattr("jdelta._src.hlo.measure.version", lambda package: "0")
        case "setting":
            monkeypatch.setattr("jdelta._src.hlo.measure._SETTINGS", ("jax_enable_x64",))
    lowered = lower(elsewhere, fun, shape, **options)
    assert measure(lowered, elsewhere, compiler_options)[0] is not None
    assert len(records()) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "",
        lambda record: "not json",
        lambda record: "[1, 2]",
        lambda record: json.dumps({**record, "peak": "many"}),
        lambda record: json.dumps({k: v for k, v in record.items() if k != "refused"}),
    ],
    ids=["empty", "text", "list", "type", "field"],
)
def test_damaged_records_are_measured_again_and_rewritten(elsewhere, records, damage):
    lowered = lower(elsewhere, jnp.sin, (8,))
    _, first = measure(lowered, elsewhere)
    (record,) = records()
    record.write_text(damage(json.loads(record.read_text())))
    compiled, second = measure(lowered, elsewhere)
    assert compiled is not None
    assert dataclasses.replace(second, seconds=first.seconds) == first
    assert json.loads(record.read_text()) == json.loads(json.dumps(dataclasses.asdict(second)))


def test_directory_that_cannot_be_written_is_no_error(elsewhere, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JDELTA_CACHE_DIR", str(tmp_path / "file"))
    assert measure(lower(elsewhere, jnp.sin, (8,)), elsewhere)[0] is not None
    assert (tmp_path / "file").read_text() == ""


def test_interrupted_write_leaves_the_old_record(directory, monkeypatch):
    cache.write("section", "name", {"value": 1})

    def interrupted(source, destination):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", interrupted)
    cache.write("section", "name", {"value": 2})
    assert cache.read("section", "name") == {"value": 1}
    assert [path.name for path in (directory / "section").iterdir()] == ["name.json"]


def test_cache_stands_in_the_users_cache_directory(monkeypatch):
    monkeypatch.delenv("JDELTA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_dir() == Path("/somewhere/jdelta")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == Path.home() / ".cache" / "jdelta"


@pytest.mark.compiler
def test_another_process_finds_the_same_record():
    script = """
        import jax, jax.numpy as jnp
        from jdelta._src.hlo.measure import measure
        from jdelta._src.backends.target import resolve
        target = resolve("tpu:v5e")
        shape = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=target.sharding())
        def step(x):
            return {"loss": jnp.tanh(x @ x).sum(), "x": x}
        compiled, measurement = measure(jax.jit(step).lower(shape), target)
        print(compiled is None, measurement.peak)
    """
    path = str(Path(jdelta.__file__).parents[1])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert [known for known, _ in outputs] == ["False", "True"]
    assert outputs[0][1] == outputs[1][1] != "0"
