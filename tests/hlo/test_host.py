"""Host bytes read off the text of a program."""

import jax
import jax.numpy as jnp
import pytest

import jdelta
from benchmarks.compilers.offload import stack
from jdelta._src.hlo.host_buffers import buffers, without_place
from jdelta._src.hlo.text import parse

ARRAY = "f32[4,256]{1,0:S(5)}"
SLOT = "f32[1,256]{1,0}"
STATE = f"(({ARRAY}, {SLOT}, s32[], s32[]), {ARRAY}, u32[])"

SLOTS = f"""HloModule slots

ENTRY %main (x: f32[1,256]) -> f32[1,256] {{
  %x = {SLOT} parameter(0)
  %i = s32[] constant(0)
  %array = {ARRAY} custom-call(), custom_call_target="AllocateBuffer"
  %out = {STATE} dynamic-update-slice-start(%array, %x, %i, %i)
  %written = {ARRAY} dynamic-update-slice-done(%out)
  %in = (({ARRAY}, s32[], s32[]), {SLOT}, u32[]) dynamic-slice-start(%written, %i, %i)
  ROOT %y = {SLOT} dynamic-slice-done(%in)
}}
"""

COPIES = """HloModule copies

ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %out = (f32[256]{0:S(5)}, f32[256]{0}, u32[]) copy-start(%x)
  %away = f32[256]{0:S(5)} copy-done(%out)
  %in = (f32[256]{0}, f32[256]{0:S(5)}, u32[]) copy-start(%away)
  ROOT %y = f32[256]{0} copy-done(%in)
}
"""


# As XLA writes it for GPUs: a slice of a host array written in place, beside the compute.
FUSED = f"""HloModule fused

%write (array: f32[4,256], x: f32[1,256], i: s32[]) -> f32[4,256] {{
  %array = {ARRAY} parameter(0)
  %x = {SLOT} parameter(1)
  %i = s32[] parameter(2)
  ROOT %written = {ARRAY} dynamic-update-slice(%array, %x, %i, %i)
}}

ENTRY %main (x: f32[1,256]) -> f32[4,256] {{
  %x = {SLOT} parameter(0)
  %i = s32[] constant(0)
  %array = {ARRAY} custom-call(), custom_call_target="AllocateBuffer"
  %out = (({ARRAY}, {SLOT}, s32[]), {ARRAY}, u32[]) fusion-start(%array, %x, %i), calls=%write
  ROOT %written = {ARRAY} fusion-done(%out)
}}
"""


@pytest.mark.parametrize(
    ("text", "sizes"), [(SLOTS, (4 * 256 * 4,)), (COPIES, (256 * 4,)), (FUSED, (4 * 256 * 4,))]
)
def test_each_buffer_counts_once_where_it_is_made(text, sizes):
    assert buffers(parse(text)) == sizes


@pytest.mark.parametrize(
    ("planned", "buffer_sizes", "missing"),
    [
        ({}, (), []),
        ({"a": 4, "b": 4}, (8,), []),  # slots of one array
        ({"a": 4, "b": 8}, (8, 4), []),
        ({"a": 4, "b": 8}, (8,), ["a"]),
        ({"a": 4, "b": 8}, (6, 6), ["b"]),  # as many bytes, but not in one piece
        ({"a": 3, "b": 4}, (4, 4), []),  # with padding
        ({"a": 4, "b": 4, "c": 4}, (8,), ["c"]),
        ({"a": 4}, (), ["a"]),
    ],
)
def test_every_name_has_a_place_of_its_own(planned, buffer_sizes, missing):
    assert without_place(planned, buffer_sizes) == missing


@pytest.mark.compiler
def test_arrays_of_two_shapes_count_once_each():
    """The TPU compiler's own figure is half as much again, or more."""

    @jdelta.remat
    def unit(w, x):
        wide = jnp.tanh(x @ jnp.concatenate([w, w], 1))
        return x + jnp.tanh(wide @ jnp.concatenate([w, w]))

    ws = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 3
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    pin = {"*": "recompute", "*/tanh*": "offload"}
    plan = jdelta.plan(stack(unit), None, ws, x, target="tpu:v5e:2x2", pin=pin)
    away = [r for r in plan.residuals if plan.decisions[r.name] is jdelta.Decision.OFFLOAD]
    assert len({r.shape for r in away}) == 2
    assert plan.host_bytes == sum(r.bytes for r in away)
