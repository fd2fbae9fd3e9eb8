import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdelta import SpillError
from jdelta._src.spill import _build, library, named_errors, read, write
from jdelta._src.spill.directory import PREFIX, remove_stale
from jdelta._src.spill.library import Key
from tests.spilling import (
    MIB,
    ROWS,
    Device,
    X,
    expected,
    fill,
    make_step,
    open_store,
    take,
    wait_until,
)

PLANNED = ROWS * X.nbytes


def run(step, x=X):
    """One step, waited for, as a planned step does it."""
    with named_errors():
        return np.asarray(step(x))


def fail_once(device, kind, nth, error):
    """Makes one transfer of a device fail."""

    def fault(this, count, _):
        if this == kind and count == nth:
            raise error

    device.fault = fault


def check_recovery(store, step):
    """The same jitted step, after an error, is right, and nothing of the failed one is left."""
    np.testing.assert_array_equal(run(step), expected())
    store.settle()
    counters = store.counters()
    assert counters.failures == 1
    assert counters.entries == counters.stored == 0


WRITE_FAULTS = {
    errno.ENOSPC: "No space left on device; make room there, or spill less",
    errno.EDQUOT: "Disk quota exceeded; make room there, or spill less",
    errno.EACCES: "Permission denied; choose a directory that this user may write to",
    errno.EIO: "Input/output error; see the system's log",
}


@pytest.mark.parametrize("number", WRITE_FAULTS)
def test_a_write_that_fails_fails_the_step_and_not_the_next(number):
    device = Device()
    store = open_store("/some/disk", adapter=device, pool="2MiB")
    step = make_step(store)
    fail_once(device, "write", 5, OSError(number, ""))
    with pytest.raises(SpillError, match=f"writing to /some/disk: {WRITE_FAULTS[number]}"):
        run(step)
    check_recovery(store, step)


def test_a_read_that_fails_fails_the_step_and_not_the_next():
    device = Device()
    store = open_store("/some/disk", adapter=device, pool="2MiB")
    step = make_step(store)
    fail_once(device, "read", 3, OSError(errno.EIO, ""))
    with pytest.raises(SpillError, match="reading from /some/disk: Input/output error"):
        run(step)
    check_recovery(store, step)


def test_what_a_device_raises_is_said():
    device = Device()
    store = open_store("/some/disk", adapter=device, pool="2MiB")
    fail_once(device, "write", 2, ValueError("the tape is torn"))
    with pytest.raises(SpillError, match="writing to /some/disk: ValueError: the tape is torn"):
        run(make_step(store))


def test_a_bit_that_flips_is_found():
    device = Device()
    store = open_store("/some/disk", adapter=device, pool="2MiB")
    step = make_step(store)

    def flip(kind, nth, offset):
        if kind == "read" and nth == 4:
            kept = bytearray(device.kept[offset])
            kept[777] ^= 4
            device.kept[offset] = bytes(kept)

    device.fault = flip
    with pytest.raises(SpillError, match="what came back is not what was written"):
        run(step)
    check_recovery(store, step)


def test_a_write_that_was_torn_is_found():
    """The device says that it has written, but half of the block is not there."""
    device = Device()
    real = device.write

    def torn(offset, data):
        real(offset, data)
        if not torn.once:
            torn.once = True
            device.kept[offset] = device.kept[offset][: len(data) // 2].ljust(len(data), b"\0")

    torn.once = False
    device.write = torn
    store = open_store("/some/disk", adapter=device, pool="2MiB")
    step = make_step(store)
    with pytest.raises(SpillError, match="what came back is not what was written"):
        run(step)
    check_recovery(store, step)


def damage(tmp_path, how):
    """Lets `how` change the only file there is."""
    (file,) = tmp_path.glob(f"{PREFIX}*/tensors")
    how(file)


def test_a_file_that_was_changed_is_found(tmp_path):
    store = open_store(tmp_path)
    fill(store, 4)
    store.settle()

    def overwrite(file):
        with file.open("r+b") as opened:
            opened.seek(2 * MIB + 5000)
            opened.write(b"other")

    damage(tmp_path, overwrite)
    with pytest.raises(SpillError, match="what came back is not what was written"):
        take(store, 2)
    assert store.counters().entries == 0


def test_a_file_that_was_cut_is_found(tmp_path):
    store = open_store(tmp_path)
    fill(store, 4)
    store.settle()
    damage(tmp_path, lambda file: os.truncate(file, 3 * MIB + 4096))
    with pytest.raises(SpillError, match="the file ends early: something else has cut it"):
        take(store, 3)


def test_more_than_the_limit_is_refused_and_a_step_within_it_is_not(tmp_path):
    store = open_store(tmp_path, limit=PLANNED)
    step = make_step(store)
    np.testing.assert_array_equal(run(step), expected())
    larger = np.tile(X, (2, 1))
    with pytest.raises(SpillError, match=f"more than limit={PLANNED}; raise the limit, or spill"):
        run(step, larger)
    check_recovery(store, step)
    assert store.counters().most_stored <= PLANNED


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "missing", Path(__file__)):
        with pytest.raises(SpillError, match=r"cannot be used: .* name an existing directory"):
            open_store(path)


def test_a_directory_that_goes_away_in_mid_step_does_no_harm(tmp_path):
    store = open_store(tmp_path, pool="1MiB")

    def remove(y):
        shutil.rmtree(tmp_path)
        return y

    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    step = make_step(store, lambda y: jax.pure_callback(remove, shape, y))
    np.testing.assert_array_equal(run(step), expected())
    assert store.counters().read > 0
    store.close()
    with pytest.raises(SpillError, match="cannot be used: No such file or directory"):
        open_store(tmp_path)


def test_a_device_that_hangs_fails_the_step_in_time_and_not_the_next():
    device, go_on = Device(), threading.Event()
    store = open_store("/some/disk", adapter=device, pool="2MiB", timeout=2.5)
    step = make_step(store)
    device.fault = lambda kind, nth, _: go_on.wait(30) if (kind, nth) == ("read", 2) else None
    start = time.monotonic()
    with pytest.raises(SpillError, match=r"/some/disk has not answered for 2\.5"):
        run(step)
    assert time.monotonic() - start < 10
    device.fault = None
    go_on.set()
    check_recovery(store, step)


def test_a_store_whose_device_hangs_is_closed_all_the_same():
    device, go_on = Device(), threading.Event()
    store = open_store("/some/disk", adapter=device)
    device.fault = lambda *_: go_on.wait(30)
    fill(store, 1)
    assert wait_until(lambda: device.calls)
    start = time.monotonic()
    store.close()
    assert time.monotonic() - start < 15
    go_on.set()


def test_a_slow_device_is_waited_for():
    device = Device()
    store = open_store(adapter=device, pool="2MiB", timeout=1.5)
    device.fault = lambda *_: time.sleep(0.3)
    np.testing.assert_array_equal(run(make_step(store)), expected())
    assert store.counters().failures == 0


def test_a_step_that_raises_leaves_room_for_the_next(tmp_path):
    store, other = open_store(tmp_path, limit=50 * PLANNED), open_store(adapter="memory")
    fails = 0  # what is not there, in another store

    def between(y):
        row = jnp.where(y[0, 0] > 100, 1, fails)
        return y + read(other, row, jax.typeof(y), slot=0, row=row)

    step = make_step(store, between)
    for _ in range(60):  # what they leave is dropped in time
        with pytest.raises(SpillError, match="slot 0, row 0 is read but not there"):
            run(step)
    np.testing.assert_array_equal(run(make_step(store)), expected())
    counters = store.counters()
    assert counters.failures == 0
    assert counters.dropped >= 16 * PLANNED
    assert counters.stored <= 40 * PLANNED
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_closed_says_so_to_steps_that_use_it(tmp_path):
    store = open_store(tmp_path)
    step = make_step(store)
    run(step)
    store.close()
    with pytest.raises(SpillError, match="the store of this step is closed; plan the step again"):
        run(step)


def test_a_store_that_is_closed_in_mid_step_fails_the_step():
    device = Device()
    store = open_store(adapter=device, pool="2MiB")
    step = make_step(store)
    device.fault = lambda *_: time.sleep(0.1)
    threading.Timer(0.3, store.close).start()
    with pytest.raises(SpillError, match=r"the store of this step (is|was) closed"):
        run(step)


def test_one_name_written_twice_or_read_twice_is_an_error():
    store = open_store(adapter="memory")

    @jax.jit
    def twice(x):
        def body(x, _):
            return x + 1, write(store, x, slot=4, row=2)

        x, tokens = jax.lax.scan(body, x, None, length=2)
        return read(store, tokens[1], jax.typeof(x), slot=4, row=2)

    with pytest.raises(SpillError, match="slot 4, row 2 is written twice in one execution"):
        run(twice)

    @jax.jit
    def read_twice(x):
        token = write(store, x, slot=0)
        y = read(store, token, jax.typeof(x), slot=0)
        row = jnp.where(y[0, 0] > 100, 1, 0)
        return y + read(store, token, jax.typeof(x), slot=0, row=row)

    with pytest.raises(SpillError, match="slot 0, row 0 is read but not there"):
        run(read_twice)


def test_write_and_read_in_two_computations_is_an_error():
    store = open_store(adapter="memory")
    token = jax.jit(lambda x: write(store, x, slot=0))(X)
    with pytest.raises(SpillError, match="write and read have to be in one jitted computation"):
        run(lambda x: read(store, token, jax.typeof(jnp.asarray(x)), slot=0))


def test_errors_keep_their_meaning_whatever_jax_makes_of_them():
    with pytest.raises(SpillError, match=r"disk full$"), named_errors():
        raise ValueError("ABORTED: SpillError: disk full")


def test_errors_of_others_keep_their_names():
    with pytest.raises(ValueError, match="mine"), named_errors():
        raise ValueError("mine")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"), named_errors():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")


def test_wrong_size_is_an_error():
    store = open_store(adapter="memory")
    fill(store, 1)
    with pytest.raises(SpillError, match="slot 0, row 0 has 1048576 bytes but is read as 5"):
        store.get(Key(1, 0, 0, 0), np.zeros(5, np.uint8))


SCRIPT = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import jax
from tests.spilling import *
path = sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
"""


def start(body, path, **options):
    """Another process that runs `body`."""
    root = str(Path(__file__).parents[2])
    script = SCRIPT + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", script, root, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        **options,
    )


def finish(process, code=0):
    """Its output, once it has ended."""
    output, errors = process.communicate(timeout=100)
    assert process.returncode == code, errors
    return output


def test_files_are_removed_at_exit(tmp_path):
    finish(start("store = open_store(path); make_step(store)(X)", tmp_path))
    assert not list(tmp_path.iterdir())


def test_files_are_removed_when_the_program_ends_with_an_error(tmp_path):
    finish(start("store = open_store(path); make_step(store)(X); 1 / 0", tmp_path), code=1)
    assert not list(tmp_path.iterdir())


STEPS = """
store = open_store(path, write_rate=50e6)
step = make_step(store)
step(X)
print("ready", flush=True)
while True:
    step(X).block_until_ready()
"""


def interrupted(process):
    """What it says when it gets Ctrl-C, a second one if need be.

    Python drops a KeyboardInterrupt that comes while a destructor or a callback of JAX's runs.
    """
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=30)[1]
    process.kill()
    return f"it hangs: {process.communicate()[1]}"


def test_ctrl_c_in_mid_step_ends_the_program_and_removes_the_files(tmp_path):
    process = start(STEPS, tmp_path)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    errors = interrupted(process)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_others_use_is_not(tmp_path):
    process = start(STEPS, tmp_path)
    assert process.stdout.readline() == "ready\n"
    (left,) = tmp_path.iterdir()
    mine = open_store(tmp_path)
    assert left.exists()  # its process lives
    process.kill()
    process.communicate(timeout=60)
    (tmp_path / f"{PREFIX}1-empty").mkdir()  # killed before it made the file
    (tmp_path / "other").mkdir()
    assert left.exists()
    fill(mine, 3)
    later = open_store(tmp_path)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2  # these two
    assert (tmp_path / "other").exists()
    assert take(mine, 2).any()
    mine.close()
    later.close()


def test_stale_directories_of_links_are_left_alone(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "tensors").write_bytes(b"precious")
    (tmp_path / f"{PREFIX}link").symlink_to(real)
    remove_stale(str(tmp_path))
    assert (real / "tensors").read_bytes() == b"precious"


def test_two_processes_share_a_directory(tmp_path):
    body = """
    store = open_store(path)
    step, right = make_step(store), expected()
    for _ in range(20):
        np.testing.assert_array_equal(step(X), right)
    """
    for process in [start(body, tmp_path) for _ in range(2)]:
        finish(process)
    assert not list(tmp_path.iterdir())


def test_a_forked_process_is_told_and_leaves_the_files(tmp_path):
    body = """
    import warnings
    warnings.simplefilter("ignore")
    from jdelta import SpillError
    store = open_store(path)
    fill(store, 2)
    child = os.fork()
    if child == 0:
        try:
            take(store, 0)
        except SpillError as error:
            print(error, flush=True)
        store.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.listdir(path)
    print(take(store, 1).any())
    """
    output = finish(start(body, tmp_path))
    assert "this process was forked from the one that planned the step" in output
    assert output.endswith("True\n")
    assert not list(tmp_path.iterdir())


def test_a_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    body = """
    from jdelta import SpillError
    from jdelta._src.spill import Spill, Store
    from jdelta._src.spill.library import library
    library()
    if os.geteuid() == 0:  # root may write anywhere
        os.seteuid(65534)
    try:
        Store(Spill(path))
    except SpillError as error:
        print(error)
    """
    for folder in (*tmp_path.parents, tmp_path):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o011:
            folder.chmod(folder.stat().st_mode | 0o011)
    output = finish(start(body, tmp_path))
    assert "cannot be used: Permission denied; name an existing directory" in output
    tmp_path.chmod(0o755)


def test_a_file_system_that_is_full_is_said(tmp_path):
    """A limit of the system on file sizes stands for a full disk."""
    body = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
    from jdelta import SpillError
    from jdelta._src.spill import named_errors
    store = open_store(path, pool="1MiB")
    try:
        with named_errors():
            make_step(store)(X).block_until_ready()
    except SpillError as error:
        print(error)
    print(store.counters().entries)
    """
    output = finish(start(body, tmp_path))
    assert f"writing to {tmp_path}: File too large; make room there, or spill less" in output
    assert output.endswith("0\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_a_system_without_memory_is_said_and_left_behind(tmp_path):
    """Not one block can be had; once there is memory again, steps are right."""
    body = """
    import resource
    from jdelta import SpillError
    from jdelta._src.spill.library import Key
    store = open_store(path)
    tensor, back = (np.full(3 * MIB, value, np.uint8) for value in (7, 0))
    store.put(Key(0, 0, 0, 0), np.zeros(0, np.uint8))  # starts the threads
    pages = int(open("/proc/self/statm").read().split()[0])
    none, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MIB // 2, hard))
    for run in (1, 2):
        try:
            store.put(Key(run, 0, 0, 0), tensor)
        except SpillError as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_AS, (none, hard))
    store.put(Key(3, 0, 0, 0), tensor)
    store.get(Key(3, 0, 0, 0), back)
    print(np.array_equal(tensor, back), store.counters().failures)
    """
    output = finish(start(body, tmp_path))
    assert output.count("the system has no memory for the pool of spilled values") == 2
    assert output.endswith("True 2\n")


def test_without_a_compiler_only_spilling_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("JDELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(_build, "library_name", lambda: "libjdelta_spill-none.so")
    with pytest.raises(SpillError, match=r"install a C\+\+17 compiler and try again .*no-such"):
        library.find_library()


def test_a_compiler_that_does_not_manage_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(\"too old\")'")
    with pytest.raises(_build.BuildError, match="failed:\ntoo old"):
        _build.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_compiler_at_all_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(_build.BuildError, match=r"no C\+\+ compiler: none of c\+\+, g\+\+, clang"):
        _build.build(tmp_path)
