"""Reading the memory of the devices: the driver's view (NVML, the CUDA runtime, or the host's) and JAX's allocator's.

NVML comes with `nvidia-ml-py`, the CUDA runtime with `cuda-bindings`; either will do. NVML alone tells which process
holds what. `DriverView.source` says which one answered.
"""

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxllm.memory.units import MIB
from jaxllm.memory.views import AllocatorView, DeviceView, DriverView, ProcessMemory

logger = logging.getLogger(__name__)

INSTALL = "pip install nvidia-ml-py cuda-bindings"

_ATTEMPTS = 5
"""Processes come and go while they are listed; a reading counts when two listings around it agree."""

_UNLISTED = 256 * MIB
"""More than the driver leaves unattributed on a quiet card, less than a process that begins or ends holds."""

_PATIENCE = 3.0
"""Seconds to wait for processes that begin or end."""


def read_device(device: jax.Device) -> DeviceView:
    """Both views of one device of this process.

    Raises:
        RuntimeError: on a GPU when neither NVML nor the CUDA runtime can be asked; says what to install.
    """
    stats = device.memory_stats()
    if device.platform == "cpu" or stats is None:
        return DeviceView(name=_name(device), driver=host_view(), allocator=None)
    allocator = allocator_view(stats)
    if device.platform != "gpu":  # another accelerator: its allocator is all there is to ask
        total = allocator.limit or allocator.in_use
        driver = DriverView(source="allocator", total=total, free=total - allocator.in_use, own=allocator.in_use)
        return DeviceView(name=_name(device), driver=driver, allocator=allocator)
    return DeviceView(name=_name(device), driver=gpu_view(device.local_hardware_id), allocator=allocator)


def read_settled(device: jax.Device) -> DeviceView:
    """`read_device`, once processes that begin or end just now are listed or gone.

    For a moment their memory is taken but not listed as anybody's, and would be billed to this engine. Where the driver
    keeps telling of memory that nobody holds, the reading with the least of it counts, after three seconds.
    """
    best, until = read_device(device), time.monotonic() + _PATIENCE
    while (best.driver.unlisted or 0) > _UNLISTED and time.monotonic() < until:
        time.sleep(0.05)
        best = min(best, read_device(device), key=lambda view: view.non_framework)
    return best


def allocator_view(stats: dict[str, int]) -> AllocatorView:
    """The figures of `Device.memory_stats()` that count here; the cuda_async allocator leaves some at 0."""
    return AllocatorView(
        in_use=stats["bytes_in_use"],
        peak=stats["peak_bytes_in_use"],
        limit=stats.get("bytes_limit", 0),
        pool=stats.get("pool_bytes", 0),
        largest_free=stats.get("largest_free_block_bytes", 0),
    )


def _name(device: jax.Device) -> str:
    return f"{device.device_kind} ({device.platform}:{device.id})"


def gpu_view(ordinal: int) -> DriverView:
    """The card with CUDA's `ordinal` in this process: NVML's view, or the CUDA runtime's where NVML cannot be asked.

    Raises:
        RuntimeError: if neither answers.
    """
    reasons = []
    readers: tuple[Callable[[int], DriverView], ...] = (_nvml_view, _cuda_view)
    for reader in readers:
        try:
            return reader(ordinal)
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{reader.__name__.strip('_')}: {error}")
    raise RuntimeError(
        f"neither NVML nor the CUDA runtime tells the memory of GPU {ordinal} ({'; '.join(reasons)}). "
        f"Install one: {INSTALL}"
    )


def _nvml_view(ordinal: int) -> DriverView:
    nvml = _nvml()
    try:
        handle = _nvml_handle(nvml, ordinal)
        before = _processes(nvml, handle)
        for _ in range(_ATTEMPTS):
            # Version 2 of the record keeps what the driver reserved apart: no process can ever have it.
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            after = _processes(nvml, handle)
            if before == after:
                break
            before = after
        held = dict(after)
        own = held.pop(os.getpid(), None)
        # Inside a container the driver may list no process, or by ids of another namespace: then nobody can be told
        # apart, and the listing is worth nothing.
        neighbours = () if own is None else tuple(ProcessMemory(pid, _process_name(pid), n) for pid, n in held.items())
        total = memory.total - memory.reserved
        return DriverView(source="NVML", total=total, free=min(memory.free, total), own=own, neighbours=neighbours)
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML says {error}") from error
    finally:
        nvml.nvmlShutdown()


def _nvml() -> Any:
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML says {error}") from error
    return nvml


def _nvml_handle(nvml: Any, ordinal: int) -> Any:
    """NVML numbers all cards by bus, CUDA the visible ones, perhaps in another order: the UUID connects them."""
    uuid = _cuda_uuid(ordinal)
    if uuid is not None:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:  # a slice of a card (multi-instance GPU)
            return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(ordinal)
    entry = visible.split(",")[ordinal].strip()
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    for index in range(nvml.nvmlDeviceGetCount()):  # an entry may be the beginning of a UUID
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(handle).startswith(entry):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(entry)


@functools.cache
def _cuda_uuid(ordinal: int) -> str | None:
    """UUID of a CUDA device as NVML writes it, or None without cuda-bindings."""
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
        status, properties = runtime.cudaGetDeviceProperties(ordinal)
    except (ImportError, OSError, RuntimeError):
        return None
    if status != runtime.cudaError_t.cudaSuccess:
        return None
    digits = bytes(properties.uuid.bytes)[:16].hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _processes(nvml: Any, handle: Any) -> dict[int, int]:
    """Bytes by process; a process that computes and draws is listed twice with the same figure."""
    listed = [*nvml.nvmlDeviceGetComputeRunningProcesses(handle), *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]
    return {process.pid: process.usedGpuMemory for process in listed if process.usedGpuMemory is not None}


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() or "unnamed"
    except OSError:
        return "name unknown"


def _cuda_view(ordinal: int) -> DriverView:
    runtime = importlib.import_module("cuda.bindings.runtime")
    before = _cuda(runtime, *runtime.cudaGetDevice())
    _cuda(runtime, *runtime.cudaSetDevice(ordinal))
    try:
        status, free, total = runtime.cudaMemGetInfo()
        _cuda(runtime, status)
        return DriverView(source="CUDA runtime", total=total, free=free)
    finally:
        _cuda(runtime, *runtime.cudaSetDevice(before))


def _cuda(runtime: Any, status: Any, value: int = 0) -> int:
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA runtime says {status.name}")
    return value


def host_view() -> DriverView:
    """The host's memory: what is available to new processes, and to this container."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # unlike the free pages, it counts what the kernel would give back, caches above all
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else free
    limit = _cgroup_number("memory.max")
    if limit is not None:
        total = min(total, limit)
        free = min(free, max(0, limit - (_cgroup_number("memory.current") or 0)))
    return DriverView(source="host memory", total=total, free=min(free, total))


def _cgroup_number(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
