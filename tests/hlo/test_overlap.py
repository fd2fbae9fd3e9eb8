import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jdelta._src.backends.chips import Rates
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.fetch_order import forward_fetches
from jdelta._src.hlo.overlap import Overlap, read_overlap
from jdelta._src.hlo.seconds import products, traffic
from jdelta._src.hlo.text import DEVICE, HOST, Array, parse
from tests.compilers import needs_cuda
from tests.flags import flags
from tests.versions import fails_in_jax_0_10_with_remat3

# Rates at which an array of a million float32 takes 1 s to the host, 2 s back and 1 s to negate.
RATES = Rates(
    matmul=(("float32", 1e9),),
    vector=1e9,
    integer=1e9,
    bandwidth=8e6,
    device_to_host=4e6,
    host_to_device=2e6,
)
SCHEDULE = "HloModule m, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}\n\n"
X, HALF = "f32[1000000]{0}", "f32[500000]{0}"
AWAY = "f32[1000000]{0:S(5)}"


def module(*entry, before=""):
    """A module whose entry has these lines."""
    lines = ["%x = " + X + " parameter(0)", "%half = " + HALF + " parameter(1)", *entry]
    entry = "\n".join("  " + line for line in lines)
    return (
        SCHEDULE
        + before
        + "\nENTRY %main (x: f32[1000000], half: f32[500000]) -> f32[4] {\n"
        + (entry + "\n}\n")
    )


def read(*entry, before="") -> Overlap:
    return read_overlap(parse(module(*entry, before=before)), RATES)


def out(name="out", source="%x"):
    return (
        f"%{name} = ({AWAY}, {X}, u32[]) copy-start({source})",
        f"%{name}.done = {AWAY} copy-done(%{name})",
    )


def back(name="back", source="%away"):
    return (
        f"%{name} = ({X}, {AWAY}, u32[]) copy-start({source})",
        f"%{name}.done = {X} copy-done(%{name})",
    )


WORK = f"%work = {X} negate(%x)"
HALF_WORK = f"%halfwork = {HALF} negate(%half)"


# Waiting


@pytest.mark.parametrize(
    ("work", "exposed", "hidden", "compute"),
    [([WORK, HALF_WORK], 0.0, 1.0, 1.5), ([HALF_WORK], 0.5, 0.5, 0.5), ([], 1.0, 0.0, 0.0)],
)
def test_compute_between_start_and_done_hides_a_copy(work, exposed, hidden, compute):
    start, done = out()
    overlap = read(start, *work, done)
    (transfer,) = overlap.transfers
    assert (transfer.name, transfer.direction, transfer.trips) == ("out", "out", 1)
    assert (transfer.bytes, transfer.seconds) == (4_000_000, 1.0)
    assert transfer.exposed == pytest.approx(exposed)
    assert (overlap.exposed_out, overlap.exposed_in) == (pytest.approx(exposed), 0.0)
    assert overlap.hidden == pytest.approx(hidden)
    assert overlap.compute == pytest.approx(compute)


def test_compute_after_the_done_hides_nothing():
    assert read(*out(), WORK).hidden == 0.0


def test_copies_in_one_direction_queue():
    (start, done), (second, second_done) = out("first"), out("second")
    first, second = read(start, second, WORK, done, second_done).transfers
    assert (first.exposed, second.exposed) == (0.0, 1.0)


def test_waiting_for_the_later_copy_is_charged_once():
    (start, done), (second, second_done) = out("first"), out("second")
    overlap = read(start, second, second_done, done)
    assert [t.exposed for t in overlap.transfers] == [0.0, 2.0]
    assert overlap.hidden == 0.0


def test_directions_do_not_share_the_link():
    (start, done), (fetch, fetched) = out(), back()
    away = f"%away = {AWAY} parameter(2)"
    overlap = read(away, start, fetch, WORK, done, fetched)
    assert (overlap.seconds_out, overlap.seconds_in) == (1.0, 2.0)
    assert (overlap.exposed_out, overlap.exposed_in) == (0.0, 1.0)
    assert (overlap.bytes_out, overlap.bytes_in) == (4_000_000, 4_000_000)
    assert overlap.hidden == pytest.approx(2 / 3)


def test_synchronous_copy_is_exposed():
    overlap = read(WORK, f"%away = {AWAY} copy(%x)", f"%y = {X} copy(%away)", HALF_WORK)
    assert (overlap.exposed_out, overlap.exposed_in) == (1.0, 2.0)
    assert (overlap.hidden, overlap.compute) == (0.0, 1.5 + 2 * 0.5)  # and device memory's side


def test_no_transfers():
    overlap = read(WORK)
    assert overlap == Overlap((), 1.0)
    assert (overlap.hidden, overlap.seconds_in, overlap.bytes_out) == (1.0, 0, 0)


def test_copies_to_memory_on_the_chip_are_no_transfers():
    assert read(
        "%c = (f32[1000000]{0:T(1024)S(1)}, f32[1000000]{0:T(1024)}, u32[]{:S(2)}) copy-start(%x)",
        "%d = f32[1000000]{0:T(1024)S(1)} copy-done(%c)",
        "%y = f32[1000000]{0:T(1024)S(1)} negate(%d)",
    ) == Overlap((), 0.0)


def test_operands_printed_with_their_shapes():
    start, done = out(source=f"{X} %x")
    done = done.replace("(%out)", f"(({AWAY}, {X}, u32[]) %out)")
    assert read(start, HALF_WORK.replace("%half)", f"{HALF} %half)"), done).exposed_out == 0.5


# Control flow

STACK = "f32[5,1000000]{1,0:S(5)}"
STATE = f"(s32[], {STACK}, {X}, /*index=3*/{HALF})"
NOTED = ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'


def slices(config):
    """Fused computations that read and write one row of a stack on the host."""
    return f"""
%reading (stack: f32[5,1000000], i: s32[], j: s32[]) -> f32[1,1000000] {{
  %stack = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %j = s32[] parameter(2)
  ROOT %slice = f32[1,1000000]{{1,0}} dynamic-slice(%stack, %i, %j), dynamic_slice_sizes={{1,9}}, \
metadata={{op_name="a/b(c)"}}, backend_config={{"dynamic_slice_config":{config}}}
}}

%writing (stack: f32[5,1000000], row: f32[1000000], i: s32[], j: s32[]) -> f32[5,1000000] {{
  %stack.1 = {STACK} parameter(0)
  %row = {X} parameter(1)
  %i.1 = s32[] parameter(2)
  %j.1 = s32[] parameter(3)
  %row.1 = f32[1,1000000]{{1,0}} bitcast(%row)
  ROOT %update = {STACK} dynamic-update-slice(%stack.1, %row.1, %i.1, %j.1)
}}

%index (trip: s32[]) -> s32[] {{
  %trip = s32[] parameter(0)
  %last = s32[] constant(4)
  ROOT %subtract = s32[] subtract(%last, %trip)
}}

%wrapping (trip: s32[]) -> (f32[], s32[]) {{
  %trip.1 = s32[] parameter(0)
  %one = s32[] constant(1)
  %minus = s32[] constant(-2)
  %past = s32[] subtract(%minus, %trip.1)
  %negative = pred[] compare(%past, %one), direction=LT
  %size = s32[] constant(6)
  %sum = s32[] add(%past, %size)
  %other = f32[] constant(0.5)
  %chosen = s32[] select(%negative, %sum, %past)
  ROOT %both = (f32[], s32[]) tuple(%other, %chosen)
}}
"""


def looping(*body, config="{}"):
    """Computations of a loop with these lines in its body."""
    lines = "\n".join("  " + line for line in body)
    return (
        slices(config)
        + f"""
%body (state: (s32[], f32[5,1000000], f32[1000000], f32[500000])) -> (s32[]) {{
  %state = {STATE} parameter(0)
  %trip = s32[] get-tuple-element(%state), index=0
  %zero = s32[] constant(0)
  %stack = {STACK} get-tuple-element(%state), index=1
  %x = {X} get-tuple-element(%state), index=2
  %half = {HALF} get-tuple-element(%state), index=3
{lines}
  ROOT %next = {STATE} tuple(%trip, %stack, %x, %half)
}}

%condition (state: (s32[], f32[5,1000000], f32[1000000], f32[500000])) -> pred[] {{
  %state = {STATE} parameter(0)
  %trip = s32[] get-tuple-element(%state), index=0
  %stop = s32[] constant(5)
  ROOT %more = pred[] compare(%trip, %stop), direction=LT
}}
"""
    )


def loop(noted):
    return (
        "%zero = s32[] constant(0)",
        "%first = s32[] copy(%zero)",
        f'%stack = {STACK} custom-call(), custom_call_target="AllocateBuffer"',
        f"%init = {STATE} tuple(%first, %stack, %x, %half)",
        f"%loop = {STATE} while(%init), condition=%condition, body=%body{noted}",
    )


STORE = (
    f"%store = (({STACK}, {X}, s32[], s32[]), {STACK}, u32[]) "
    "fusion-start(%stack, %x, %trip, %zero), kind=kLoop, calls=%writing",
    f"%stored = {STACK} fusion-done(%store)",
)
FETCH = (
    f"%fetch = (({STACK}, s32[], s32[]), f32[1,1000000]{{1,0}}, u32[]) "
    "fusion-start(%stack, %row, %zero), kind=kLoop, calls=%reading",
    "%fetched = f32[1,1000000]{1,0} fusion-done(%fetch)",
)
REVERSED = "%row = s32[] fusion(%trip), kind=kLoop, calls=%index"


@pytest.mark.parametrize("noted", [NOTED, ""], ids=["GPU", "TPU"])
def test_transfers_of_a_loop(noted):
    store, stored = STORE
    fetch, fetched = FETCH
    body = looping(store, HALF_WORK, stored, REVERSED, fetch, WORK, fetched)
    overlap = read(*loop(noted), before=body)
    out, back = overlap.transfers
    assert (out.bytes, out.trips, out.exposed) == (4_000_000, 5, pytest.approx(0.5))
    assert (back.bytes, back.trips, back.exposed) == (4_000_000, 5, pytest.approx(1.0))
    assert (overlap.bytes_out, overlap.bytes_in) == (20_000_000, 20_000_000)
    assert (overlap.seconds_out, overlap.seconds_in) == (5.0, 10.0)
    assert (overlap.exposed_out, overlap.exposed_in) == (pytest.approx(2.5), pytest.approx(5.0))
    assert overlap.hidden == pytest.approx(0.5)
    assert overlap.compute == pytest.approx(7.5, abs=1e-5)


def test_what_computes_may_be_priced_otherwise():
    def price(_module, _computation, instruction, _rates):
        return 0.75 if instruction.opcode == "negate" else 0.0

    start, done = out()
    text = parse(module(start, HALF_WORK, done))
    assert read_overlap(text, RATES).hidden == pytest.approx(0.5)
    overlap = read_overlap(text, RATES, price)
    assert (overlap.compute, overlap.hidden) == (0.75, pytest.approx(0.75))
    assert overlap.seconds_out == 1.0


@pytest.mark.parametrize(
    ("this", "that", "trips"),
    [
        ("s32[] constant(0)", "s32[] constant(2)", 3),
        ("direction=LT", "direction=NE", 1),
        ("constant(5)", "add(%trip, %trip)", 1),
        ("constant(5)", "constant(-1)", 0),
    ],
)
def test_trips_of_a_loop_are_read_off_its_condition(this, that, trips):
    text = module(*loop(""), before=looping(HALF_WORK)).replace(this, that)
    assert read_overlap(parse(text), RATES).compute == pytest.approx(trips * 0.5, abs=1e-5)


def test_slices_of_a_loop_without_a_fusion():
    overlap = read(
        *loop(""),
        before=looping(
            f"%store = (({STACK}, f32[1,1000000]{{1,0}}, s32[], s32[]), {STACK}, u32[]) "
            "dynamic-update-slice-start(%stack, %row, %trip, %zero)",
            "%row = f32[1,1000000]{1,0} bitcast(%x)",
            f"%stored = {STACK} dynamic-update-slice-done(%store)",
            f"%fetch = (({STACK}, s32[], s32[]), f32[1,1000000]{{1,0}}, u32[]) "
            "dynamic-slice-start(%stack, %trip, %zero), dynamic_slice_sizes={1,1000000}",
            "%fetched = f32[1,1000000]{1,0} dynamic-slice-done(%fetch)",
        ),
    )
    assert (overlap.bytes_out, overlap.bytes_in) == (20_000_000, 20_000_000)
    assert (overlap.exposed_out, overlap.exposed_in) == (5.0, 10.0)


def test_synchronous_fusion_that_reads_the_host():
    fetch = "%f = f32[1,1000000]{1,0} fusion(%stack, %trip, %zero), kind=kLoop, calls=%reading"
    overlap = read(*loop(NOTED), before=looping(fetch))
    assert (overlap.seconds_in, overlap.exposed_in, overlap.hidden) == (10.0, 10.0, 0.0)


def test_a_loop_hides_a_copy_around_it():
    start, done = out()
    overlap = read(start, *loop(NOTED), done, before=looping(HALF_WORK))
    assert (overlap.hidden, overlap.exposed_out) == (1.0, 0.0)
    assert overlap.compute == pytest.approx(2.5)


def test_a_copy_around_a_loop_delays_those_inside():
    start, done = out()
    store, stored = STORE
    overlap = read(start, *loop(NOTED), done, before=looping(store, HALF_WORK, stored))
    around, inside = overlap.transfers
    assert around.exposed == 0.0
    assert inside.exposed == pytest.approx((5 * 0.5 + 1.0) / 5)


@pytest.mark.parametrize(
    "branches",
    [
        "conditional(%p, %x, %x), true_computation=%slow, false_computation=%fast",
        "conditional(%p, %x, %x), branch_computations={%fast, %slow}",
    ],
)
def test_the_slowest_branch_counts(branches):
    copies = "\n  ".join(out(source="%y"))
    before = f"""
%fast (y: f32[1000000]) -> f32[1000000] {{
  %y = {X} parameter(0)
  ROOT %z = {X} negate(%y)
}}

%slow (y: f32[1000000]) -> f32[1000000] {{
  %y = {X} parameter(0)
  {copies}
  ROOT %z = {X} negate(%y)
}}
"""
    overlap = read("%p = pred[] constant(true)", f"%c = {X} {branches}", before=before)
    assert (overlap.compute, overlap.exposed_out, overlap.bytes_out) == (1.0, 1.0, 4_000_000)


def test_calls_are_followed():
    copies = "\n  ".join(out(source="%y"))
    before = f"\n%f (y: f32[1]) -> f32[1] {{\n  %y = {X} parameter(0)\n  {copies}\n}}\n"
    assert read(f"%c = {AWAY} call(%x), to_apply=%f", before=before).bytes_out == 4_000_000


# Cost of instructions

FUSED_DOT = """
%inner (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  ROOT %d = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  %c = f32[8,4]{1,0} fusion(%a, %b), kind=kOutput, calls=%inner
  ROOT %e = f32[8,4]{1,0} negate(%c)
}
"""
GEMM = (
    'backend_config={"operation_queue_id":"0","gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}'
)


@pytest.mark.parametrize(
    ("shapes", "result", "line", "flops"),
    [
        (
            ("f32[3,8,16]{2,1,0}", "f32[3,16,4]{2,1,0}"),
            "f32[3,8,4]{2,1,0}",
            "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}",
            2 * 3 * 8 * 4 * 16,
        ),
        (
            ("f32[8,16]{1,0}", "f32[16,4]{1,0}"),
            "f32[8,4]{1,0}",
            "fusion(%a, %b), kind=kOutput, calls=%outer",
            2 * 8 * 4 * 16,
        ),
        (
            ("bf16[8,16]{1,0:T(8,128)(2,1)}", "bf16[16,4]{1,0:T(8,128)(2,1)}"),
            "f32[8,4]{1,0:T(8,128)}",
            "convolution(%a, %b), dim_labels=bf_io->bf",
            2 * 8 * 4 * 16,
        ),
        (  # a batch of 96, as a window
            ("bf16[96,128,64]{2,1,0}", "bf16[96,256,64]{2,1,0}"),
            "bf16[96,128,256]{2,1,0}",
            "convolution(%a, %b), window={size=96 stride=95 lhs_dilate=96}, "
            "dim_labels=0bf_0oi->0bf",
            2 * 96 * 128 * 256 * 64,
        ),
        (  # another way to write a batch
            ("bf16[8,12,64,32]{3,2,1,0}", "bf16[8,12,16,32]{3,2,1,0}"),
            "bf16[8,12,64,16]{3,2,1,0}",
            "convolution(%a, %b), window={size=8x12 stride=8x12 pad=7_7x11_11 lhs_dilate=7x11 "
            "rhs_reversal=1x1}, dim_labels=01bf_01oi->01bf",
            2 * 8 * 12 * 64 * 16 * 32,
        ),
        (  # contracted over the window
            ("bf16[8,1024,768]{2,1,0}", "bf16[8,1024,256]{2,1,0}"),
            "f32[768,256,1]{1,0,2}",
            "convolution(%a, %b), window={size=8}, dim_labels=0fb_0io->bf0",
            2 * 8 * 1024 * 768 * 256,
        ),
        (  # images; a row and a column of padding cost nothing
            ("f32[2,8,8,3]{3,2,1,0}", "f32[3,3,3,5]{3,2,1,0}"),
            "f32[2,8,8,5]{3,2,1,0}",
            "convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 2 * 5 * 3 * (8 * 3 - 2) ** 2,
        ),
        (
            ("f16[3,16,8]{2,1,0}", "f16[3,16,4]{2,1,0}"),
            "(f16[3,8,4]{2,1,0}, s8[4194304]{0})",
            f'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", {GEMM}',
            2 * 3 * 8 * 4 * 16,
        ),
        (  # three systems of 16 equations, 4 right-hand sides each
            ("f32[3,16,16]{1,2,0}", "f32[3,16,4]{1,2,0}"),
            "(f32[3,16,4]{1,2,0}, s8[0]{0})",
            'custom-call(%a, %b), custom_call_target="__cublas$triangularSolve", '
            'backend_config={"left_side":true,"lower":true,"transpose_a":"NO_TRANSPOSE"}',
            2 * 3 * 16 * 4 * 16,
        ),
        (
            ("f32[2,7,7,3]{3,2,1,0}", "f32[5,3,3,3]{3,2,1,0}"),
            "(f32[2,3,3,5]{3,2,1,0}, u8[0]{0})",
            "custom-call(%a, %b), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, "
            'custom_call_target="__cudnn$convForward"',
            2 * 2 * 5 * 3 * 9 * 9,
        ),
        (
            ("f32[2,7,7,3]{3,2,1,0}", "f32[2,3,3,5]{3,2,1,0}"),
            "(f32[5,3,3,3]{3,2,1,0}, u8[0]{0})",
            "custom-call(%a, %b), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, "
            'custom_call_target="__cudnn$convBackwardFilter"',
            2 * 2 * 5 * 3 * 9 * 9,
        ),
        (
            ("f32[2,3,3,5]{3,2,1,0}", "f32[5,3,3,3]{3,2,1,0}"),
            "(f32[2,7,7,3]{3,2,1,0}, u8[0]{0})",
            "custom-call(%a, %b), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, "
            'custom_call_target="__cudnn$convBackwardInput"',
            2 * 2 * 5 * 3 * 9 * 9,
        ),
    ],
)
def test_flops(shapes, result, line, flops):
    a, b = (f"%{n} = {s} parameter({i})" for i, (n, s) in enumerate(zip("ab", shapes, strict=True)))
    program = parse(module(a, b, f"ROOT %c = {result} {line}", before=FUSED_DOT))
    ((kind, count),) = products(program, program.entry, program.entry.root)
    assert count == flops
    assert kind == program.entry["a"].array.numpy_dtype


@pytest.mark.parametrize(
    "product",
    [
        "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        "operand_precision={highest,highest}",
        'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config='
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
        '"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}}',
    ],
)
def test_a_product_of_higher_precision_is_another_kind(product):
    square = "f32[8,8]{1,0}"
    a, b = (f"%{name} = {square} parameter({i})" for i, name in enumerate("ab"))
    program = parse(module(a, b, f"ROOT %c = {square} {product}"))
    pairs = products(program, program.entry, program.entry.root)
    assert list(pairs) == [("float32 highest", 2 * 8**3)]


def test_what_a_back_end_notes_in_another_language_is_left_aside():
    """Of an FFI handler XLA prints attributes of MLIR, as they are for a Cholesky on a GPU."""
    noted = 'custom_call_target="cusolver_potrf_ffi", backend_config={lower = true}'
    call = f"%call = {X} custom-call(%x), {noted}, api_version=API_VERSION_TYPED_FFI"
    start, done = out()
    assert read(start, call, done).hidden == 1.0


def test_random_bits_take_the_longer_of_their_operations_and_traffic():
    """A mask of a million takes 0.125 s to write, an operation on as many integers 1 ms."""
    words = "u32[1000000]{0}"
    rounds = [
        line
        for i in range(200)
        for line in (
            f"%left{i} = {words} shift-left(%x{i}, %x{i})",
            f"%right{i} = {words} shift-right-logical(%x{i}, %x{i})",
            f"%turned{i} = {words} or(%left{i}, %right{i})",
            f"%sum{i} = {words} add(%turned{i}, %x{i})",
            f"%x{i + 1} = {words} xor(%sum{i}, %x{i})",
        )
    ]

    def compute(rounds):
        last = rounds[-1].split()[0] if rounds else "%x0"
        lines = [f"%x0 = {words} iota(), iota_dimension=0", *rounds]
        bits = f"ROOT %small = pred[1000000]{{0}} compare({last}, {last}), direction=LT"
        body = "".join(f"  {line}\n" for line in [*lines, bits])
        fused = "%bits () -> pred[1000000] {\n" + body + "}\n"
        mask = "%mask = pred[1000000]{0} fusion(), kind=kLoop, calls=%bits"
        return read(mask, before=fused).compute

    assert compute([]) == pytest.approx(0.125)
    assert compute(rounds) == pytest.approx(0.6)  # a rotation is one operation


def test_a_product_takes_the_longer_of_arithmetic_and_traffic():
    def dot(k):
        return read(
            f"%a = f32[1000,{k}]{{1,0}} parameter(2)",
            f"%b = f32[{k},1000]{{1,0}} parameter(3)",
            "%c = f32[1000,1000]{1,0} dot(%a, %b), lhs_contracting_dims={1}",
        ).compute

    assert dot(1000) == pytest.approx(2.0)  # 2e9 FLOPs, 12 MB
    assert dot(1) == pytest.approx((4e6 + 8e3) / 8e6)


IN_PLACE = """
%slicing (s: f32[10,100], i: s32[], t: f32[10,100], u: f32[100]) -> (f32[1,100], f32[10,100]) {
  %s = f32[10,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %t = f32[10,100]{1,0} parameter(2)
  %u = f32[100]{0} parameter(3)
  %b = f32[10,100]{1,0} bitcast(%s)
  %row = f32[1,100]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,100}
  %v = f32[1,100]{1,0} bitcast(%u)
  %new = f32[10,100]{1,0} dynamic-update-slice(%t, %v, %i, %i)
  ROOT %both = (f32[1,100]{1,0}, f32[10,100]{1,0}) tuple(%row, %new)
}

%tiled (w: f32[10,100]) -> f32[10,100] {
  %w = f32[10,100]{1,0:T(32,128)} parameter(0)
  ROOT %as = f32[10,100]{1,0:T(8,128)} copy(%w)
}

%tiling (z: f32[10,100], j: s32[]) -> f32[1,100] {
  %z = f32[10,100]{1,0:T(32,128)} parameter(0)
  %j = s32[] parameter(1)
  %o = f32[10,100]{1,0:T(8,128)} fusion(%z), output_to_operand_aliasing={{}: (0, {})}, calls=%tiled
  ROOT %one = f32[1,100]{1,0} dynamic-slice(%o, %j, %j), dynamic_slice_sizes={1,100}
}
"""
ROW = 400


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("f32[10,100]{1,0} negate(%s)", 10 * ROW, 10 * ROW),
        ("f32[2,100]{1,0} slice(%s), slice={[0:2], [0:100]}", 2 * ROW, 2 * ROW),
        ("f32[1,100]{1,0} dynamic-slice(%s, %i, %i)", ROW + 8, ROW),
        ("f32[10,100]{1,0} dynamic-update-slice(%s, %r, %i, %i)", ROW + 8, ROW),
        (
            "(f32[1,100]{1,0}, f32[10,100]{1,0}) fusion(%s, %i, %s, %u), calls=%slicing",
            2 * ROW + 4,
            2 * ROW,
        ),
        ("f32[1,100]{1,0} fusion(%s, %i), calls=%tiling", ROW + 4, ROW),
        ("f32[10,100]{1,0:S(1)} negate(%s)", 10 * ROW, 0),
        ("f32[10,100]{1,0} bitcast(%s)", 0, 0),
        ("(f32[10,100]{1,0}) tuple(%s)", 0, 0),
    ],
)
def test_bytes_of_slices(line, read, written):
    program = parse(
        module(
            "%s = f32[10,100]{1,0} parameter(2)",
            "%i = s32[] parameter(3)",
            "%r = f32[1,100]{1,0} parameter(4)",
            "%u = f32[100]{0} parameter(5)",
            f"ROOT %y = {line}",
            before=IN_PLACE,
        )
    )
    assert traffic(program, program.entry, program.entry.root, DEVICE) == (read, written)
    assert traffic(program, program.entry, program.entry.root, HOST) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "size", "name"),
    [
        ("pred", 9, "bool"),
        ("bf16", 18, "bfloat16"),
        ("s4", 5, "int4"),
        ("u32", 36, "uint32"),
        ("f8e4m3fn", 9, "float8_e4m3fn"),
        ("c64", 72, "complex64"),
        ("token", 0, "token"),
    ],
)
def test_element_types(dtype, size, name):
    array = Array(dtype, (3, 3))
    assert (array.bytes, array.numpy_dtype) == (size, name)
    assert name == "token" or jnp.dtype(name).name == name


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[6,32,512,64]{3,2,1,0:T(8,128)(2,1)}", 6 * 32 * 512 * 128 * 2),
        ("bf16[6,32,512,64]{2,3,1,0:T(8,128)(2,1)S(5)}", 6 * 32 * 512 * 64 * 2),
        ("f32[5,100]{0,1:T(8,128)}", 104 * 128 * 4),
        ("f32[300]{0:T(128)}", 384 * 4),
        ("f32[]{:T(128)}", 4),
        ("f32[5,100]{1,0}", 2000),
    ],
)
def test_tiles_are_padded(shape, size):
    text = module(f"%tiled = {shape} parameter(2)")
    assert parse(text).entry["tiled"].array.bytes == size


# The order of fetches


BACKWARDS = '{"loop_index":"0","byte_offset":"16000000","byte_stride":"-4000000"}'
FORWARDS = '{"loop_index":"0","byte_offset":"0","byte_stride":"4000000"}'
NEWER = '{"loop_index":"0","byte_offset":"0","byte_stride":"0","linear":%s}'
DIRECT = "%row = s32[] copy(%trip)"
WRAPPED = (
    "%two = (f32[], s32[]) fusion(%trip), kind=kLoop, calls=%wrapping",
    "%row = s32[] get-tuple-element(%two), index=1",
)
ELSEWHERE = "%row = s32[] get-tuple-element(%state), index=7"


@pytest.mark.parametrize(
    ("index", "config", "wrong"),
    [
        ([REVERSED], BACKWARDS, False),
        ([REVERSED], FORWARDS, True),
        ([REVERSED], NEWER % BACKWARDS, False),
        ([REVERSED], NEWER % FORWARDS, True),
        ([DIRECT], FORWARDS, False),
        ([DIRECT], BACKWARDS, True),
        (WRAPPED, BACKWARDS, False),
        (WRAPPED, FORWARDS, True),
        ([ELSEWHERE], FORWARDS, True),
        ([REVERSED], '{"loop_index":"1","byte_stride":"4000000"}', True),
        ([REVERSED], '{"table":["1"]}', True),
    ],
)
def test_fetches_in_another_order_than_indexed(index, config, wrong):
    """What cannot be read is not taken for right."""
    text = module(*loop(NOTED), before=looping(*index, *FETCH, config=config))
    assert forward_fetches(parse(text)) == (["slice"] if wrong else [])


@pytest.mark.parametrize(("stride", "wrong"), [("8000000", False), ("4000000", True)])
def test_offsets_are_linear_in_the_trip_not_in_the_counter(stride, wrong):
    noted = NOTED.replace('"n":"5"', '"n":"2"').replace(
        '"init":"0","step":"1"', '"init":"1","step":"2"'
    )
    config = f'{{"loop_index":"0","byte_offset":"4000000","byte_stride":"{stride}"}}'
    text = module(*loop(noted), before=looping(DIRECT, *FETCH, config=config))
    assert forward_fetches(parse(text)) == (["slice"] if wrong else [])


PIPELINED = (
    ', backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"1","step":"1"},'
    '"known_induction_variable":{"tuple_index":"0"},"dynamic_variables":'
    '[{"tuple_index":"0","init":"1","step":"1"},{"tuple_index":"4"}]}'
)
"""What XLA:GPU notes on a loop that it pipelines: of the index of a later row it has no start."""


def pipelined(config, *, first="%last", following="fusion(%trip), kind=kLoop, calls=%index"):
    """A loop that fetches in each trip the row that the trip before has computed the index of."""
    row = "%row = s32[] get-tuple-element(%state), index=4"
    lines = row, f"%following = s32[] {following}", *FETCH
    text = module(
        "%last = s32[] constant(4)", *loop(PIPELINED), before=looping(*lines, config=config)
    )
    text = text.replace(STATE, STATE.replace(HALF, f"{HALF}, s32[]"))
    text = text.replace(
        "tuple(%first, %stack, %x, %half)", f"tuple(%one, %stack, %x, %half, {first})"
    )
    text = text.replace("%first = s32[] copy(%zero)", "%one = s32[] constant(1)")
    return text.replace(
        "tuple(%trip, %stack, %x, %half)", "tuple(%trip, %stack, %x, %half, %following)"
    )


@pytest.mark.parametrize(
    ("config", "options", "wrong"),
    [
        (BACKWARDS, {}, False),
        (FORWARDS, {}, True),
        (NEWER % BACKWARDS, {}, False),
        (NEWER % FORWARDS, {}, True),
        (BACKWARDS, {"first": "%zero"}, True),
        (BACKWARDS, {"following": "copy(%row)"}, True),
        (BACKWARDS, {"following": 'custom-call(%trip), custom_call_target="f"'}, True),
    ],
)
def test_fetches_of_a_loop_that_is_pipelined(config, options, wrong):
    text = pipelined(config, **options)
    assert forward_fetches(parse(text)) == (["slice"] if wrong else [])
    assert read_overlap(parse(text), RATES).bytes_in == 4 * 4_000_000


def test_slices_of_device_memory_are_no_fetches():
    text = module(*loop(NOTED), before=looping(REVERSED, *FETCH, config=FORWARDS))
    assert forward_fetches(parse(text.replace(":S(5)", ""))) == []


# Real compilers

LAYERS, ROWS, WIDTH = 6, 4096, 512


def scanned(target):
    """The gradient of a scan with one residual on the host, compiled."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "h")), None

    def loss(ws, x):
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return (jax.lax.scan(body, x, ws)[0] ** 2).mean()

    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=target.sharding()) for s in shapes]
    lowered = jax.jit(jax.grad(loss)).trace(*args).lower(lowering_platforms=(target.platform,))
    return lowered.compile().as_text()


@fails_in_jax_0_10_with_remat3
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["tpu:v5e", pytest.param("cuda:h100", marks=needs_cuda)])
@pytest.mark.parametrize("setting", ["jax_optimization_level", "jax_memory_fitting_level"])
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_compiled_scan_at_another_level(name, setting, level):
    target = resolve(name)
    with flags(**{setting: level}):
        program = parse(scanned(target))
    overlap = read_overlap(program, target.rates)
    moved = LAYERS * ROWS * WIDTH * 4
    assert (overlap.bytes_out, overlap.bytes_in) == (moved, moved)
    assert (forward_fetches(program) == []) == (target.offload_refusal is None)


@fails_in_jax_0_10_with_remat3
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["tpu:v5e", pytest.param("cuda:h100", marks=needs_cuda)])
def test_a_compiled_scan(name):
    target = resolve(name)
    text = scanned(target)
    overlap = read_overlap(parse(text), target.rates)
    moved = LAYERS * ROWS * WIDTH * 4
    assert (overlap.bytes_out, overlap.bytes_in) == (moved, moved)
    assert [transfer.trips for transfer in overlap.transfers] == [LAYERS, LAYERS]
    assert overlap.seconds_in == pytest.approx(moved / target.rates.host_to_device)
    assert 0 < overlap.hidden < 1
    products = 3 * LAYERS * 2 * ROWS * WIDTH * WIDTH
    assert overlap.compute > products / target.rates.flops("float32")
    assert (forward_fetches(parse(text)) == []) == (target.offload_refusal is None)
