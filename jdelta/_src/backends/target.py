"""The device a plan is made for: attached here, or only known to its compiler."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jdelta._src import _jax
from jdelta._src.backends.backend import Backend
from jdelta._src.backends.chips import CHIPS, Rates, chip_of
from jdelta._src.backends.platforms import BACKENDS, backend_of, platform_of
from jdelta._src.backends.rates import Device, measured_rates
from jdelta._src.backends.topology import topology_devices
from jdelta._src.errors import TargetError
from jdelta._src.versions import version

_HOST = "pinned_host"


@dataclass(frozen=True)
class Target:
    """A kind of device, what it can hold and how fast it is.

    Attributes:
        name: What ``resolve`` takes: "tpu:v5e:2x2", or the platform alone for attached devices.
        platform: "tpu", "cuda" or "cpu".
        kind: JAX's name of the device kind.
        memory: Bytes per device that a program can use.
        host_memory: Bytes of pinned host memory for all devices of a process together; ``None``
            when unknown.
        rates: Published rates ahead of time, measured ones for attached devices.
        offload_refusal: Why nothing may be offloaded to the host here; ``None`` when it may.
        ahead_of_time: Whether the devices exist for the compiler only: programs cannot run.
    """

    name: str
    platform: str
    kind: str
    memory: int
    host_memory: int | None
    rates: Rates
    offload_refusal: str | None
    ahead_of_time: bool
    _devices: tuple[Device, ...] = field(repr=False, compare=False)

    @property
    def backend(self) -> Backend:
        """What is known of its compiler."""
        return backend_of(self.platform)

    def devices(self) -> tuple[Device, ...]:
        """The devices to compile for; the first is that of a single-device program."""
        return self._devices

    def sharding(self, like: Sharding | None = None) -> Sharding:
        """Where an argument stands on this target.

        Args:
            like: Its sharding on other devices. One on this target's own devices is kept, a
                ``NamedSharding`` keeps mesh shape, axes, specification and host memory, any other
                becomes the first device.

        Raises:
            TargetError: The mesh has more devices than the target, or the argument is in host
                memory and the target (CUDA ahead of time) has none for arguments.
        """
        if like is not None and self._holds(like):
            return like
        memory_kind = _HOST if like is not None and like.memory_kind == _HOST else None
        if isinstance(like, NamedSharding):
            here = NamedSharding(self._mesh(like), like.spec, memory_kind=memory_kind)
        else:
            here = SingleDeviceSharding(self._devices[0], memory_kind=memory_kind)
        if here.memory_kind is None and memory_kind is not None:
            # JAX drops memory kinds of devices that do not list them.
            raise TargetError(f"target {self.name!r} takes no arguments in host memory")
        return here

    def abstract(self, tree: Any) -> Any:
        """``tree`` with every array replaced by its shape and dtype, placed on this target.

        Beside arguments sharded over a mesh, those that are not are replicated over it, as
        ``jax.jit`` does with arrays that are not committed to a device.
        """
        shardings = map(committed_sharding, jax.tree.leaves(tree))
        meshed = next((s for s in shardings if isinstance(s, NamedSharding)), None)
        unmeshed = meshed and NamedSharding(meshed.mesh, PartitionSpec())

        def place(leaf: Any) -> Any:
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                return leaf
            like = committed_sharding(leaf)
            like = like if unmeshed is None or isinstance(like, NamedSharding) else unmeshed
            return jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=_traceable(self.sharding(like)),
                weak_type=getattr(leaf, "weak_type", False),
                is_ref=_jax.is_ref(leaf),
            )

        return jax.tree.map(place, tree)

    def host_share(self, placed: Any) -> float | None:
        """Bytes of pinned host memory for each device of a process that arguments are placed on."""
        if self.host_memory is None:
            return None
        devices = {d.id: d for d in _devices_of(placed) or self._devices[:1]}.values()
        used = Counter(device.process_index for device in devices)
        return self.host_memory / max(used.values())

    def _holds(self, sharding: Sharding) -> bool:
        if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
            return False
        return sharding.device_set <= set(self._devices)

    def _mesh(self, sharding: NamedSharding) -> Mesh:
        mesh = sharding.mesh
        if mesh.size > len(self._devices):
            raise TargetError(
                f"target {self.name!r} has {len(self._devices)} devices, but an argument is "
                f"sharded over a mesh of {mesh.size} ({dict(mesh.shape)}); name a larger topology"
            )
        devices = np.array(self._devices[: mesh.size]).reshape(mesh.axis_sizes)
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _traceable(sharding: Sharding) -> Sharding:
    """The same place, said so that a shape traced there keeps its memory: JAX needs a mesh."""
    if sharding.memory_kind != _HOST or not isinstance(sharding, SingleDeviceSharding):
        return sharding
    mesh = Mesh(np.array(list(sharding.device_set)), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=_HOST)


def is_on_host(leaf: Any) -> bool:
    """Whether an argument lives in pinned host memory."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == _HOST


def resolve(target: str | None = None, args: object = ()) -> Target:
    """The target that a name or the arguments of a step stand for.

    Args:
        target: ``None`` for the devices that the arrays in ``args`` live on (else JAX's default
            device); "tpu", "cuda" or "cpu" for attached devices; "tpu:v5e:2x2" or "cuda:h100" for
            devices that only their compiler knows, with the smallest topology when none is named.
        args: A pytree; leaves that are no arrays do not count.

    Raises:
        TargetError: No such target, no such device here, or its compiler is not installed.
    """
    if target is None:
        return _attached(_devices_of(args) or (jax.local_devices()[0],))
    if target in BACKENDS:
        here = jax.process_index()
        return _attached(tuple(d for d in _all_devices(target) if d.process_index == here))
    platform, chip, topology = _parts(target)
    devices = topology_devices(platform, chip, topology)
    return _ahead_of_time(platform, chip, topology, devices)


def resolve_planned(target: str, args: object) -> Target:
    """The target of a plan for a call: devices of that kind that the arguments live on, if they do.

    A plan made ahead of time is so for the devices themselves, once they are there.

    Args:
        target: Name of the target that the plan was made for.
        args: Arguments of the step.

    Raises:
        TargetError: No such device here, or its compiler is not installed.
    """
    devices = _devices_of(args)
    if devices and set(devices) <= set(attached(target)):
        return _attached(devices)
    return resolve(target, args)


def attached(target: str) -> tuple[Device, ...]:
    """The devices of this job that a target's name stands for, made ahead of time or not."""
    platform = target.partition(":")[0]
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        return ()
    kind = None if target == platform else CHIPS[platform][_parts(target)[1]].kind
    return tuple(device for device in devices if kind in (None, device.device_kind))


def published(target: str) -> Target:
    """A target that nothing will be compiled for: its rates and sizes, without its compiler.

    Args:
        target: As for ``resolve``; devices of this machine have to be there.

    Raises:
        TargetError: No such target, or no such device here.
    """
    if target in BACKENDS:
        return resolve(target)
    return _ahead_of_time(*_parts(target), devices=())


def names() -> tuple[str, ...]:
    """The targets that can be planned for ahead of time, each with its smallest topology."""
    return tuple(
        f"{platform}:{chip}:{chips[chip].topology}"
        for platform, chips in CHIPS.items()
        for chip in chips
    )


def _parts(target: str) -> tuple[str, str, str]:
    """Platform, chip and topology of a target's name."""
    platform, _, rest = target.partition(":")
    chip, _, topology = rest.partition(":")
    if chip not in CHIPS.get(platform, {}):
        raise TargetError(f"unknown target {target!r}{_meant(target)}; there are {_known()}")
    return platform, chip, topology or CHIPS[platform][chip].topology


def _chips() -> list[str]:
    return [f"{platform}:{chip}" for platform, chips in CHIPS.items() for chip in chips]


def _meant(target: str) -> str:
    """The known name of a target that was written otherwise: ``H100`` for ``cuda:h100``."""
    asked = target.lower().partition(":")
    alike = [name for name in _chips() if name == "".join(asked) or name.endswith(f":{asked[0]}")]
    return f" (did you mean {alike[0]!r}?)" if alike else ""


def _known() -> str:
    return (
        f"{', '.join(_chips())} (each also with a topology: 'tpu:v5e:4x4'), and 'tpu', 'cuda', "
        "'cpu' for the devices of this machine"
    )


def committed_sharding(leaf: Any) -> Sharding | None:
    """Where an argument has to be: an array that is not committed goes to where the others are."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _devices_of(args: object) -> tuple[Device, ...]:
    """The devices under the arrays of ``args``, in the order of their ids.

    Those of committed arrays; where there are none, those that the others are on.
    """
    leaves = jax.tree.leaves(args)
    known = _devices_under(map(committed_sharding, leaves))
    devices = known or _devices_under(getattr(leaf, "sharding", None) for leaf in leaves)
    if len({device.platform for device in devices}) > 1:
        kinds = sorted({device.device_kind for device in devices})
        raise TargetError(f"the arguments live on devices of different kinds: {kinds}; name one")
    return tuple(sorted(devices, key=lambda device: device.id))


def _devices_under(shardings: Iterable[Sharding | None]) -> set[Device]:
    devices: set[Device] = set()
    for sharding in shardings:
        abstract = isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh)
        if isinstance(sharding, Sharding) and not abstract:
            devices |= sharding.device_set
    return devices


def _all_devices(platform: str) -> list[Device]:
    """The devices of this job, on every machine of it."""
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise TargetError(
            f"no {platform} device is attached to this machine; to compile for one ahead of time "
            f"name it: {_known()}"
        ) from error


def _attached(devices: tuple[Device, ...]) -> Target:
    """The target made of devices of this job."""
    device = devices[0]
    platform = platform_of(device)
    backend = backend_of(platform)
    if device not in _all_devices(platform):
        raise TargetError(
            f"the arguments live on a {device.device_kind} that is not attached to this machine; "
            f"name the target instead: {_known()}"
        )
    chip = chip_of(device.device_kind)
    return Target(
        name=platform,
        platform=platform,
        kind=device.device_kind,
        memory=_memory(device),
        host_memory=backend.devices.pinned(_physical_memory()),
        rates=measured_rates(device, chip and chip.rates),
        offload_refusal=_offload_refusal(backend),
        ahead_of_time=False,
        _devices=devices,
    )


def _memory(device: Device) -> int:
    """Bytes the allocator hands out; on a CPU an equal share of the machine's memory."""
    if not backend_of(platform_of(device)).devices.have_own_memory:
        return _physical_memory() // jax.local_device_count(device.platform)
    stats = jax.local_devices(backend=device.platform)[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise TargetError(
            f"JAX's allocator for {device.device_kind} does not tell its limit; name the target "
            f"instead ({_known()}), or unset XLA_PYTHON_CLIENT_ALLOCATOR"
        )
    return int(stats["bytes_limit"])


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _offload_refusal(backend: Backend) -> str | None:
    release = tuple(int(part) for part in re.findall(r"\d+", version("jaxlib"))[:3])
    return backend.devices.offload_refusal(release)


def _ahead_of_time(
    platform: str, chip_name: str, topology: str, devices: tuple[Device, ...]
) -> Target:
    """The target made of devices that only the compiler of ``platform`` knows."""
    chip, backend = CHIPS[platform][chip_name], backend_of(platform)
    name = f"{platform}:{chip_name}:{topology}"
    return Target(
        name=name,
        platform=platform,
        kind=chip.kind,
        memory=int(chip.memory * backend.devices.memory_share()),
        host_memory=backend.devices.pinned(None),
        rates=chip.rates,
        offload_refusal=_offload_refusal(backend),
        ahead_of_time=True,
        _devices=devices,
    )
