"""Published figures of the accelerators a plan can be made for without owning one."""

import math
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

_GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """How fast a device computes and moves bytes.

    Attributes:
        matmul: Pairs of a kind of matrix product (see ``product_kind``) and FLOP/s of a large one.
            At JAX's default precision float32 is one bfloat16 pass on a TPU and TF32 on a GPU.
        vector: FLOP/s of float32 arithmetic outside matrix products.
        integer: Operations/s on 32-bit integers: additions, shifts, logic.
        bandwidth: Bytes/s of device memory, reads and writes together.
        device_to_host: Bytes/s from device memory to pinned host memory.
        host_to_device: Bytes/s from pinned host memory to device memory.
        interconnect: Bytes/s that a device sends to others of its mesh axis. (Not printed: the
            measurements kept on disk, which know no links between devices, go by what is.)
        spread: How much longer than the least time the median of repeats was, of the rate where
            that is most: 0.07 for 7 %. 0 for published rates. (Neither printed nor compared.)
    """

    matmul: tuple[tuple[str, float], ...]
    vector: float
    integer: float
    bandwidth: float
    device_to_host: float
    host_to_device: float
    interconnect: float = field(default=math.inf, repr=False)
    spread: float = field(default=0.0, repr=False, compare=False)

    def flops(self, kind: str) -> float:
        """FLOP/s of a kind of matrix product.

        A precision without a figure of its own runs like the default. A dtype without one runs as
        what it is converted to, or made of: narrow floats as bfloat16, narrow integers as int8,
        complex numbers as their parts, else at float32's rate, slower in proportion when wider.
        """
        known, dtype = dict(self.matmul), kind.partition(" ")[0]
        for name in (kind, dtype, _instead(dtype)):
            if name in known:
                return known[name]
        return known["float32"] * min(1.0, 4 / np.dtype(_instead(dtype)).itemsize)


def _instead(dtype: str) -> str:
    """The dtype whose matrix products those of another one become."""
    if dtype.startswith("complex"):
        return {"complex64": "float32", "complex128": "float64"}[dtype]
    if dtype.startswith(("float8", "float6", "float4")) and dtype != "float64":
        return "bfloat16"
    return "int8" if dtype in _NARROW_INTEGERS else dtype


_NARROW_INTEGERS = frozenset({"bool", "int2", "int4", "uint2", "uint4", "uint8"})


def multiply_add_flops(dtype: str) -> float:
    """FLOPs of a multiplication and an addition: those of complex numbers are of four and four."""
    return 8.0 if dtype.startswith("complex") else 2.0


def product_kind(dtype: str, precision: str = "default") -> str:
    """The name by which ``Rates`` knows a matrix product: "bfloat16", "float32 highest".

    Args:
        dtype: Of its operands.
        precision: One of ``jax.lax.Precision``, in small letters.
    """
    return dtype if precision == "default" else f"{dtype} {precision}"


@dataclass(frozen=True)
class Chip:
    """One accelerator of the table.

    Attributes:
        kind: What JAX calls it (``jax.Device.device_kind``).
        memory: Device memory that a program can use, bytes.
        rates: Published rates; the host link is an estimate.
        topology: Smallest arrangement of chips the compiler takes.
        description: ``GpuTargetConfig`` in protobuf text form; empty for TPUs, which libtpu knows.
    """

    kind: str
    memory: int
    rates: Rates
    topology: str
    description: str = ""


_PASSES = {"high": 3, "highest": 6}
"""Products of bfloat16 that a TPU makes of one of float32, by precision (``jax.lax.Precision``)."""


def _tpu(
    kind: str,
    topology: str,
    memory: float,
    bfloat16: float,
    int8: float,
    vector: float,
    bandwidth: float,
    link: float,
    ici: float,
) -> Chip:
    """A TPU row: ``memory`` in GiB, ``bfloat16``, ``int8`` and ``vector`` in TFLOP/s, else GB/s.

    ``ici`` is what all links of a chip carry, both directions together. A mesh axis is taken to lie
    along one dimension of the torus.
    """
    matmul = {
        **dict.fromkeys(("bfloat16", "float16", "float32"), bfloat16),
        **{product_kind("float32", name): bfloat16 / passes for name, passes in _PASSES.items()},
        "int8": int8,
    }
    along_one = ici / 2 / (topology.count("x") + 1)
    rates = _rates(matmul, vector, vector / 2, bandwidth, link, along_one)
    return Chip(kind, int(memory * _GIB), rates, topology=topology)


def _rates(
    matmul: dict[str, float],
    vector: float,
    integer: float,
    bandwidth: float,
    link: float,
    interconnect: float,
) -> Rates:
    """Rates from TFLOP/s, 10^12 operations/s and GB/s, the host link the same both ways."""
    return Rates(
        matmul=tuple((dtype, rate * 1e12) for dtype, rate in sorted(matmul.items())),
        vector=vector * 1e12,
        integer=integer * 1e12,
        bandwidth=bandwidth * 1e9,
        device_to_host=link * 1e9,
        host_to_device=link * 1e9,
        interconnect=interconnect * 1e9,
    )


# The fields of GpuTargetConfig that every NVIDIA data-centre chip below has in common.
_CUDA_DESCRIPTION = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_optin}
  cuda_compute_capability {{ major: {capability} feature_extension: {features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""


def _tensor_cores(bfloat16: float, **others: float) -> dict[str, float]:
    """TFLOP/s by dtype, where half precision has one rate and bytes, of either kind, another."""
    return {
        **others,
        **dict.fromkeys(("bfloat16", "float16"), bfloat16),
        **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), others["int8"]),
    }


_INTEGER_LANES = 64
"""Of a multiprocessor of those chips: NVIDIA's white papers on their architectures."""


def _cuda(
    kind: str,
    matmul: dict[str, float],
    vector: float,
    link: float,
    nvlink: float,
    **facts: int | float | str,
) -> Chip:
    """A GPU row: rates in TFLOP/s and GB/s; ``facts`` fill the compiler's description.

    ``nvlink`` is what all links of a GPU carry, both directions together.
    """
    memory, bandwidth = int(facts["memory"]), float(facts["bandwidth"]) / 1e9
    integer = _INTEGER_LANES * float(facts["cores"]) * float(facts["clock"]) / 1e3
    exact = product_kind("float32", "highest")  # without tensor cores
    return Chip(
        kind,
        memory,
        _rates({**matmul, exact: vector}, vector, integer, bandwidth, link, nvlink / 2),
        topology="1x1x8",  # slices x hosts x devices: one machine of eight
        description=_CUDA_DESCRIPTION.format(kind=kind, **facts),
    )


# TPU matmul, bandwidth, links between chips: Google Cloud's system architecture pages for v5e, v5p
# and v6e (cloud.google.com/tpu/docs/v5e, /v5p, /v6e). Memory: what the compiler says is available
# when it refuses a program, a little under the 16, 95 and 32 GB of those pages. Not published, so
# estimates: `vector` (8 x 128 lanes x 4 units x 2 FLOP x clock x cores; an operation on integers
# takes a lane as long as two FLOP) and the host link, both after "How to Scale Your Model",
# chapter 2 (jax-ml.github.io/scaling-book/tpus).
_TPUS = {
    "v5e": _tpu("TPU v5 lite", "2x2", 15.75, 197, 393, 12, 819, 15, 400),
    "v5p": _tpu("TPU v5", "2x2x1", 95.73, 459, 918, 28, 2765, 15, 1200),
    "v6e": _tpu("TPU v6 lite", "2x2", 31.24, 918, 1836, 14, 1640, 30, 800),
}

# What the driver reports of every GPU of that architecture on an SXM board.
_HOPPER: dict[str, int | float | str] = {
    "cores": 132,
    "fpus": 128,
    "clock": 1.98,
    "shared_per_core": 233472,
    "shared_optin": 232448,
    "capability": 9,
    "features": "ACCELERATED_FEATURES",
}

# GPU matmul (dense, without sparsity), vector, bandwidth and NVLink: NVIDIA's data sheets for A100
# 80GB SXM, H100 SXM, H200 SXM and HGX B200 (1000 W). The host link is an estimate: 85 % of PCIe 4.0
# x16 (32 GB/s) or PCIe 5.0 x16 (64 GB/s) in one direction. The other facts are what the driver
# reports.
_GPUS = {
    "a100": _cuda(
        "NVIDIA A100-SXM4-80GB",
        {"bfloat16": 312, "float16": 312, "float32": 156, "float64": 19.5, "int8": 624},
        vector=19.5,
        link=27,
        nvlink=600,
        memory=85100068864,
        bandwidth=2039040000000,
        cores=108,
        fpus=64,
        clock=1.41,
        l2=41943040,
        shared_per_core=167936,
        shared_optin=166912,
        capability=8,
        features="NONE",
    ),
    "h100": _cuda(
        "NVIDIA H100 80GB HBM3",
        _tensor_cores(bfloat16=989, float32=494, float64=67, int8=1979),
        vector=67,
        link=54,
        nvlink=900,
        memory=84942979072,
        bandwidth=3352320000000,
        l2=52428800,
        **_HOPPER,
    ),
    "h200": _cuda(
        "NVIDIA H200",
        _tensor_cores(bfloat16=989, float32=494, float64=67, int8=1979),
        vector=67,
        link=54,
        nvlink=900,
        memory=150108897280,
        bandwidth=4916736000000,
        l2=62914560,
        **_HOPPER,
    ),
    "b200": _cuda(
        "NVIDIA B200",
        _tensor_cores(bfloat16=2250, float32=1100, float64=40, int8=4500),
        vector=80,
        link=54,
        nvlink=1800,
        memory=191514411008,
        bandwidth=7672320000000,
        cores=148,
        fpus=128,
        clock=1.965,
        l2=132644864,
        shared_per_core=233472,
        shared_optin=232448,
        capability=10,
        features="ACCELERATED_FEATURES",
    ),
}

CHIPS = MappingProxyType({"tpu": _TPUS, "cuda": _GPUS})
"""Platform, then chip name as it stands in a target, to its figures."""


def chip_of(kind: str) -> Chip | None:
    """The table's chip that JAX calls ``kind``; ``None`` when it is not in the table."""
    chips = (chip for chips in CHIPS.values() for chip in chips.values())
    return next((chip for chip in chips if chip.kind == kind), None)
