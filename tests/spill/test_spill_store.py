import ctypes
import os
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jdelta import SpillError
from jdelta._src.spill import Spill, rates_of, read, write
from jdelta._src.spill.library import Key, library
from tests.spilling import (
    MIB,
    ROWS,
    Device,
    X,
    expected,
    fill,
    flow,
    make_step,
    open_store,
    take,
    usage,
    wait_until,
)

TOKEN = jax.ShapeDtypeStruct((), jnp.int32)
PLANNED = ROWS * X.nbytes


@pytest.fixture(params=["disk", "memory", "device"])
def store(request, tmp_path):
    adapter = Device() if request.param == "device" else request.param
    store = open_store(tmp_path, adapter=adapter)
    yield store
    store.close()


def test_a_scanned_step_gets_back_what_it_wrote(store):
    step = make_step(store)
    for _ in range(3):
        np.testing.assert_array_equal(step(X), expected())
    counters = flow(store)
    assert counters.planned == 3 * PLANNED
    assert counters.pool <= 4 * MIB
    assert counters.forwarded + counters.held + counters.read >= counters.planned


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows priorities of threads")
def test_threads_that_move_blocks_give_way_to_those_that_compute(tmp_path):
    """But not the one on which XLA goes on where something had to wait: it computes."""
    store = open_store(tmp_path, write_rate=100e6)
    before = niceness()
    np.testing.assert_array_equal(make_step(store)(X), expected())
    counters = flow(store)
    assert counters.waits + counters.late
    added = [nice for task, nice in niceness().items() if task not in before]
    behind = min(os.nice(0) + 10, 19)  # where Linux ends
    assert added.count(behind) == 5 or os.nice(0) == 19  # the store's own
    assert set(added) <= {os.nice(0), behind}


def niceness():
    """Of each thread of this process."""
    stats = [task.read_text() for task in Path("/proc/self/task").glob("*/stat")]
    return {stat.split()[0]: int(stat.rsplit(")", 1)[1].split()[16]) for stat in stats}


DTYPES = "float32 bfloat16 float16 float8_e4m3fn bool int8 int32 uint16 complex64".split()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1025, 1027)])
def test_any_dtype_and_shape_comes_back_as_it_was(dtype, shape):
    store = open_store(adapter="memory")
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype)

    @jax.jit
    def step(x):
        return read(store, write(store, x, slot=3), jax.typeof(x), slot=3)

    np.testing.assert_array_equal(step(x), x)
    assert flow(store).planned == x.nbytes


@pytest.mark.parametrize("dtype", ["int4", "key<fry>"])
def test_elements_that_are_not_whole_bytes_are_refused(dtype):
    store = open_store(adapter="memory")
    x = jax.random.key(0) if dtype == "key<fry>" else jnp.zeros(4, dtype)
    with pytest.raises(SpillError, match=f"{dtype} are not whole bytes"):
        write(store, x, slot=0)


def test_rows_of_nested_loops_and_slots_are_apart(store):
    rows = 3

    def step(x):
        def inner_forward(x, row):
            token = write(store, x, slot=1, row=row)
            return x + 1, token

        def forward(x, row):
            token = write(store, x * 10, slot=0, row=row)
            y, tokens = jax.lax.scan(inner_forward, x, row * rows + jnp.arange(rows))
            return y, (token, tokens)

        def inner_backward(total, token_row):
            token, row = token_row
            return total + read(store, token, jax.typeof(total), slot=1, row=row), None

        def backward(total, tokens_row):
            (token, tokens), row = tokens_row
            total += read(store, token, jax.typeof(total), slot=0, row=row)
            inner = (tokens, row * rows + jnp.arange(rows))
            return jax.lax.scan(inner_backward, total, inner, reverse=True)[0], None

        y, tokens = jax.lax.scan(forward, x, jnp.arange(rows))
        return jax.lax.scan(backward, y, (tokens, jnp.arange(rows)), reverse=True)[0]

    x = np.zeros((300, 1000), np.float32)
    # y = 9; slot 0 adds 10 * (0 + 3 + 6), slot 1 adds 0 + ... + 8
    np.testing.assert_array_equal(jax.jit(step)(x), x + 9 + 90 + 36)
    flow(store)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_each_device_writes_its_part(store, kind):
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(kind, kind))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def step(x):
        token = write(store, x, slot=0, sharding=sharding)
        return read(store, token, jax.typeof(x), slot=0, sharding=sharding) * 2

    x = jax.device_put(X, sharding)
    compiled = jax.jit(step).lower(x).compile()
    result = jax.block_until_ready(compiled(x))  # comparing waits for one of each part only
    np.testing.assert_array_equal(result, X * 2)
    assert "all-gather" not in compiled.as_text()
    assert flow(store).planned == 2 * X.nbytes  # by each of the two that have the same part


@pytest.mark.parametrize("check", [True, False])
def test_inside_shard_map(store, check):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    step = jax.shard_map(
        make_step(store), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check
    )
    np.testing.assert_array_equal(jax.jit(step)(X), expected())
    assert flow(store).planned == PLANNED


@pytest.mark.parametrize("pool", ["1MiB", "3MiB"])
def test_collectives_around_a_full_pool_do_not_lock_up(pool):
    store = open_store(adapter="memory", pool=pool, write_rate=300e6, read_rate=300e6)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def run(store):
        step = make_step(store, lambda y: y + jax.lax.pmean(y, "data"))

        def twice(x):  # what was read may be written again
            return step(jax.lax.pmean(step(x), "data") + x)

        return jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=spec, out_specs=spec))(X)

    np.testing.assert_array_equal(run(store), run(None))
    assert flow(store).planned == 2 * PLANNED
    assert store.counters().late > 0


def test_what_was_written_before_is_read_at_the_same_time():
    device = Device()
    both = threading.Barrier(2)  # passed only by two reads at once
    store = open_store(adapter=device)
    tensors = fill(store, 2)
    store.settle()
    device.fault = lambda *_: both.wait(30)
    for row in (1, 0):
        np.testing.assert_array_equal(take(store, row), tensors[row])
    assert not both.broken


def test_the_step_does_not_wait_for_a_slow_device_and_queued_writes_are_cancelled():
    store = open_store(adapter="memory", pool="32MiB", write_rate=1e6)
    step = make_step(store).lower(X).compile()
    start = time.perf_counter()
    np.testing.assert_array_equal(step(X), expected())
    seconds = time.perf_counter() - start
    counters = store.counters()
    assert seconds < PLANNED / 1e6 / 2  # the device alone would take twelve seconds
    assert counters.waits == counters.late == counters.read == 0
    assert counters.forwarded >= PLANNED - 2 * MIB  # but for what was on its way already
    assert flow(store).written <= 2 * MIB


def test_a_small_pool_makes_writes_wait_and_is_never_exceeded(tmp_path):
    store = open_store(tmp_path, pool="1MiB", write_rate=100e6)
    np.testing.assert_array_equal(make_step(store)(X), expected())
    counters = flow(store)
    assert counters.waits > 0
    assert counters.pool == MIB


def test_the_memory_adapter_keeps_the_blocks_themselves():
    """As a device does, it takes none of the processor's time."""
    store = open_store(adapter="memory")
    resident = []
    for _ in range(6):
        tensors = fill(store, 32)
        store.settle()
        assert store.counters().pool == 0  # the device has them all
        for row in reversed(range(32)):
            np.testing.assert_array_equal(take(store, row), tensors[row])
            assert store.counters().pool <= 4 * MIB
        resident.append(usage()[2])
    assert resident[-1] < resident[1] + 4 * MIB  # blocks are used again
    assert flow(store).written == 6 * 32 * MIB


def test_a_pool_whose_blocks_the_device_took_is_not_out_of_memory():
    """Between two blocks it has none, while others wait for one."""
    store = open_store(adapter="memory", pool="1MiB")

    def use(device):
        tensor = np.full(2 * MIB + 5, device, np.uint8)
        for run in range(20):
            for row in range(3):
                store.put(Key(run, device, 0, row), tensor)
            for row in reversed(range(3)):
                back = np.empty_like(tensor)
                store.get(Key(run, device, 0, row), back)
                np.testing.assert_array_equal(back, tensor)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(use, range(6)))
    assert store.counters().failures == 0
    assert store.counters().waits > 0


def test_reads_come_ahead_in_reverse_order_of_writes():
    device = Device()
    store = open_store(adapter=device)
    tensors = fill(store, 12)
    store.settle()
    written = [offset for kind, offset in device.calls if kind == "write"]
    order = {offset: i for i, offset in enumerate(sorted(written))}
    np.testing.assert_array_equal(take(store, 11), tensors[11])
    assert wait_until(lambda: store.counters().read == 5 * MIB)  # one, and four that the pool holds
    reads = [order[offset] for kind, offset in device.calls if kind == "read"]
    assert 11 in reads[:2]  # reads that go on at once may overtake each other
    assert sorted(reads) == [7, 8, 9, 10, 11]
    late_reads = store.counters().late
    np.testing.assert_array_equal(take(store, 10), tensors[10])
    assert store.counters().late == late_reads  # it was there
    for row in reversed(range(10)):
        np.testing.assert_array_equal(take(store, row), tensors[row])
    assert flow(store).read == 12 * MIB  # none twice


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 1, 2, 3), (1, 3, 0, 2)])
def test_nothing_is_brought_ahead_twice(order):
    """Two devices share a pool, and read what is written last in the order of their programs."""
    store = open_store(adapter="memory", pool="16MiB")
    tensor, units, size = np.zeros(MIB, np.uint8), 6, len(order)
    keys = [Key(1, device, 0, row) for row in range(units * size) for device in range(2)]
    for key in keys:
        store.put(key, tensor)
    store.settle()
    for unit in reversed(range(units)):
        for row in order:
            for device in range(2):
                store.get(Key(1, device, 0, unit * size + row), tensor)
    assert flow(store).read == len(keys) * MIB


def test_any_order_of_reads_is_right(store):
    tensors = fill(store, 16, size=3 * MIB // 2)
    for row in np.random.default_rng(1).permutation(16):
        np.testing.assert_array_equal(take(store, row, 3 * MIB // 2), tensors[row])
    flow(store)


def test_two_steps_in_flight_do_not_mix(store):
    step = make_step(store)
    inputs = [X + i for i in range(4)]
    results = [None] * 4

    def run(i):
        for _ in range(3):
            results[i] = np.asarray(step(inputs[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, result in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(result, expected(x))
    assert flow(store).planned == 12 * PLANNED


def test_denormals_are_flushed_as_without_a_store():
    """XLA goes on where a read ends, on a thread of the store's."""
    store = open_store(adapter="memory")

    def plain(x):
        return x[:3] * x[3:6]  # small, so computed on that very thread

    def spilled(x):
        token = jax.pure_callback(settle, TOKEN, write(store, x, slot=0))
        return plain(read(store, token, jax.typeof(x), slot=0))

    def settle(token):
        store.settle()
        return token

    x = np.full(2 * MIB, 1e-20, np.float32)
    flushed = jax.jit(plain)(x)
    np.testing.assert_array_equal(jax.jit(spilled)(x), flushed)
    np.testing.assert_array_equal(flushed, 0)
    assert store.counters().late == 1


def test_two_hundred_steps_grow_nothing(tmp_path):
    store = open_store(tmp_path)
    x = X[:256]  # one block
    step, right = make_step(store).lower(x).compile(), expected(x)
    for _ in range(20):
        step(x).block_until_ready()
    (folder,) = tmp_path.iterdir()
    files, threads, memory = usage()
    size = (folder / "tensors").stat().st_size
    for _ in range(200):
        result = step(x).block_until_ready()
    np.testing.assert_array_equal(result, right)
    later_files, later_threads, later_memory = usage()
    assert later_files <= files
    assert later_threads <= threads + 8  # threads that complete operations come and go
    assert later_memory < memory + 16 * MIB
    planned = ROWS * x.nbytes
    assert (folder / "tensors").stat().st_size <= max(size, planned)
    assert flow(store).most_stored <= 2 * planned
    store.close()


def test_files_are_private_and_removed(tmp_path):
    store = open_store(tmp_path)
    fill(store, 2)
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_store_that_nobody_has_any_more_is_removed(tmp_path):
    open_store(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1, 15, 100, MIB - 1, MIB + 5])
@pytest.mark.parametrize("adapter", ["disk", "memory"])
def test_sizes_that_nothing_divides(adapter, size, tmp_path):
    store = open_store(tmp_path, adapter=adapter)
    tensors = fill(store, 4, size=size)
    store.settle()
    for row in reversed(range(4)):
        np.testing.assert_array_equal(take(store, row, size), tensors[row])
    store.close()


def copy(source, target):
    """The sums that the native copy gives; streams of 32-bit words are its last two axes."""
    sums = np.zeros((2, 4, 2), np.uint64)
    size = source.nbytes
    library().jdelta_spill_copy(target.ctypes.data, source.ctypes.data, size, sums.ctypes.data)
    return sums


def fletcher(data):
    """The same by definition: sums, sums of sums and so on, of every fourth 32-bit word."""
    padded = np.zeros(-(-data.size // 16) * 16, np.uint8)
    padded[: data.size] = data
    groups = padded[: data.size // 16384 * 16384].reshape(-1, 4, 64, 64)  # pages, lines, bytes
    turned = np.stack([np.roll(groups[:, page], -16 * page, axis=1) for page in range(4)], axis=2)
    padded[: groups.size] = turned.reshape(-1)
    words = padded.view("<u4").reshape(-1, 2, 2).astype(np.uint64)
    sums = np.zeros((2, 4, 2), np.uint64)
    for order in range(4 if data.size else 0):
        words = np.cumsum(words, axis=0, dtype=np.uint64)
        sums[:, order] = words[-1].T
    return sums


SIZES = [*range(101), 16383, 16384, 16401, MIB - 1, MIB, MIB + 17]


@pytest.mark.parametrize("skips", [(0, 0), (1, 0), (0, 1), (8, 8), (3, 13)])
def test_a_copy_is_exact_and_its_sums_are_fletchers(skips):
    random = np.random.default_rng(0)
    data = random.integers(0, 256, max(SIZES) + 64, np.uint8)
    data[: MIB // 2] = 255  # so that sums overflow
    for size in SIZES:
        source = data[skips[0] :][:size]
        around = np.full(size + 64, 7, np.uint8)
        target = around[16 - around.ctypes.data % 16 :][skips[1] :]
        np.testing.assert_array_equal(copy(source, target), fletcher(source))
        np.testing.assert_array_equal(target[:size], source)
        assert (around == 7).sum() - (source == 7).sum() == 64  # nothing beside it was touched


def test_sums_see_every_bit():
    data = np.arange(77, dtype=np.uint8)
    target = np.zeros_like(data)
    sums = {copy(data, target).tobytes()}
    for bit in range(77 * 8):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(copy(data, target).tobytes())
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 77 * 8


def test_sums_see_what_changes_places():
    data = np.zeros((64, 512), np.uint8)
    data[7, 3] = data[20, 35] = 1  # two sectors of the same sum, in the same stream
    swapped = data.copy()
    swapped[[7, 20]] = data[[20, 7]]
    assert (copy(data, data.copy()) != copy(swapped, data.copy())).any()


@pytest.mark.parametrize("checksum", [True, False])
def test_rates_are_those_of_the_device(checksum, monkeypatch):
    monkeypatch.setattr("jdelta._src.spill.rates.TENSOR", 2 * MIB)  # of 8 MiB it takes long
    # So slow that sleeping is nearly all of it, on a busy machine too.
    spill = Spill("", adapter="memory", write_rate=40e6, read_rate=20e6, checksum=checksum)
    rates = rates_of(spill)
    assert 0.3 * 40e6 < rates.write < 1.1 * 40e6
    assert 0.3 * 20e6 < rates.read < 1.1 * 20e6
    assert rates_of(spill) is rates
    later = rates_of(spill, remeasure=True)
    assert later is not rates
    assert rates_of(spill) is later


def test_rates_of_a_directory(tmp_path):
    rates = rates_of(Spill(str(tmp_path)))
    assert rates.write > 1e6
    assert rates.read > 1e6
    assert not list(tmp_path.iterdir())


def test_busy_time_gives_the_rate_of_a_step():
    store = open_store(adapter="memory", pool="2MiB", write_rate=40e6, read_rate=40e6)
    np.testing.assert_array_equal(make_step(store)(X), expected())
    counters = flow(store)
    assert 0.3 * 40e6 < counters.written / (counters.writing * 1e-9) < 1.1 * 40e6
    assert 0.3 * 40e6 < counters.read / (counters.reading * 1e-9) < 1.1 * 40e6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapter": "tape"}, "adapter: expected 'disk', 'memory', 'kvikio' or an object"),
        ({"pool": "1KiB"}, "pool: expected at least 1048576 bytes"),
        ({"pool": 0.5}, "pool: expected bytes"),
        ({"limit": "some"}, "limit: expected bytes"),
        ({"write_rate": 0}, "write_rate: expected a number above zero"),
        ({"read_rate": -1.0}, "read_rate: expected a number above zero"),
        ({"timeout": float("inf")}, "timeout: expected a number above zero"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    with pytest.raises(SpillError, match=says):
        Spill("/tmp", **options)


def test_a_spill_may_be_given_as_a_path(tmp_path):
    assert Spill.of(tmp_path) == Spill(str(tmp_path)) == Spill.of(Spill(str(tmp_path)))
    assert Spill.of(tmp_path).pool_bytes == 256 * MIB
    assert Spill(str(tmp_path), limit="2GiB").limit_bytes == 2 << 30


class FakeCuFile:
    """KvikIO's file, with what jdelta uses of it."""

    def __init__(self, path, mode):
        assert mode == "r+"
        self.file = os.open(path, os.O_RDWR)

    def pwrite(self, data, file_offset):
        return FakeFuture(os.pwrite(self.file, data, file_offset))

    def pread(self, data, file_offset):
        return FakeFuture(os.preadv(self.file, [data], file_offset))

    def close(self):
        os.close(self.file)


class FakeFuture:
    def __init__(self, moved):
        self.moved = moved

    def get(self):
        return self.moved


def test_kvikio_is_used_where_it_is(tmp_path, monkeypatch):
    module = type(ctypes)("kvikio")
    module.CuFile = FakeCuFile
    monkeypatch.setitem(sys.modules, "kvikio", module)
    store = open_store(tmp_path, adapter="kvikio")
    tensors = fill(store, 6)
    store.settle()
    for row in reversed(range(6)):
        np.testing.assert_array_equal(take(store, row), tensors[row])
    store.close()
    assert not list(tmp_path.iterdir())


def test_kvikio_that_is_not_there_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(SpillError, match="needs KvikIO, which is not installed"):
        open_store(tmp_path, adapter="kvikio")
    assert not list(tmp_path.iterdir())


def test_empty_tensors_are_no_trouble():
    store = open_store(adapter="memory")
    store.put(Key(0, 0, 0, 0), np.zeros(0, np.uint8))
    store.get(Key(0, 0, 0, 0), np.zeros(0, np.uint8))
    assert flow(store).planned == 0
