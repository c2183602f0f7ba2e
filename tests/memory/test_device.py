"""Reading devices: the CPU for real, NVML and the CUDA runtime as stand-ins with their real interface."""

import os
import sys
import types

import jax
import pytest

from jaxllm.memory import device
from jaxllm.memory.units import GIB, MIB
from jaxllm.memory.views import AllocatorView, DeviceView, DriverView, ProcessMemory

UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"


class FakeNvml(types.ModuleType):
    """Two cards; the one with `UUID` is index 1. Listings follow one another as `listings` says."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self, listings: list[dict[int, int | None]]):
        super().__init__("pynvml")
        self.listings = listings
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return ["GPU-ffff", f"GPU-{UUID}"][handle]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in ("GPU-ffff", f"GPU-{UUID}"):
            raise self.NVMLError("not found")
        return int(uuid != "GPU-ffff")

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> types.SimpleNamespace:
        assert version == 2
        return types.SimpleNamespace(total=100 * GIB, reserved=GIB, free=(40 + handle) * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        listing = self.listings.pop(0) if len(self.listings) > 1 else self.listings[0]
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in listing.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        return []


def fake_cuda() -> types.ModuleType:
    module = types.ModuleType("cuda.bindings.runtime")
    ok = types.SimpleNamespace(name="cudaSuccess")
    module.cudaError_t = types.SimpleNamespace(cudaSuccess=ok)
    properties = types.SimpleNamespace(uuid=types.SimpleNamespace(bytes=bytes(range(16))))
    module.cudaGetDeviceProperties = lambda ordinal: (ok, properties)
    module.cudaGetDevice = lambda: (ok, 3)
    module.chosen = []
    module.cudaSetDevice = lambda ordinal: module.chosen.append(ordinal) or (ok,)
    module.cudaMemGetInfo = lambda: (ok, 40 * GIB, 99 * GIB)
    return module


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def put(nvml: object, cuda: object) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
        device._cuda_uuid.cache_clear()

    yield put
    device._cuda_uuid.cache_clear()


def test_nvml_view(install) -> None:
    me = os.getpid()
    nvml = FakeNvml([{me: 50 * GIB, 999_999_999: 8 * GIB, 7: None}])
    install(nvml, fake_cuda())
    view = device.gpu_view(0)
    assert view == DriverView(
        source="NVML",
        total=99 * GIB,  # without what the driver keeps
        free=41 * GIB,  # of the card with the UUID, not of index 0
        own=50 * GIB,
        neighbours=(ProcessMemory(999_999_999, "name unknown", 8 * GIB),),
    )
    assert nvml.open == 0


def test_reading_is_repeated_while_processes_come_and_go(install) -> None:
    me = os.getpid()
    nvml = FakeNvml([{me: GIB, 5: GIB}, {me: GIB}, {me: GIB}])
    install(nvml, fake_cuda())
    assert device.gpu_view(0).neighbours == ()


def test_processes_that_begin_or_end_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody is listed with is a neighbour's that just ended, unless it stays."""
    allocator = AllocatorView(in_use=GIB, peak=GIB, limit=40 * GIB, pool=40 * GIB)

    def reading(unlisted: int) -> DeviceView:
        own = 40 * GIB + 600 * MIB
        driver = DriverView(source="NVML", total=99 * GIB, free=99 * GIB - own - unlisted, own=own)
        assert driver.unlisted == unlisted
        return DeviceView(name="card", driver=driver, allocator=allocator)

    readings = [reading(8 * GIB), reading(8 * GIB), reading(20 * MIB), reading(0)]
    monkeypatch.setattr(device, "read_device", lambda _: readings.pop(0))
    monkeypatch.setattr(device.time, "sleep", lambda _: None)
    assert device.read_settled(None).non_framework == 620 * MIB and len(readings) == 1

    monkeypatch.setattr(device, "_PATIENCE", 0.01)
    monkeypatch.setattr(device, "read_device", lambda _: reading(2 * GIB))
    assert device.read_settled(None).non_framework == 600 * MIB + 2 * GIB


def test_container_that_hides_processes(install) -> None:
    install(FakeNvml([{1234567: 50 * GIB}]), fake_cuda())
    view = device.gpu_view(0)
    assert view.own is None and view.neighbours == ()


@pytest.mark.parametrize(("visible", "free"), [(None, 40), ("1", 41), ("GPU-0001", 41), (f"GPU-ffff,GPU-{UUID}", 40)])
def test_mapping_without_cuda_bindings(
    install, monkeypatch: pytest.MonkeyPatch, visible: str | None, free: int
) -> None:
    install(FakeNvml([{os.getpid(): GIB}]), None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.gpu_view(0).free == free * GIB


def test_cuda_runtime_where_there_is_no_nvml(install) -> None:
    cuda = fake_cuda()
    install(None, cuda)
    view = device.gpu_view(1)
    assert (view.source, view.total, view.free, view.own) == ("CUDA runtime", 99 * GIB, 40 * GIB, None)
    assert cuda.chosen == [1, 3]  # and the caller's device is current again


def test_neither(install) -> None:
    install(None, None)
    with pytest.raises(RuntimeError, match=r"Install one: pip install nvidia-ml-py cuda-bindings$"):
        device.gpu_view(0)


def test_cpu() -> None:
    view = device.read_device(jax.devices("cpu")[0])
    assert view.allocator is None
    assert view.driver.source == "host memory"
    assert 0 < view.driver.free <= view.driver.total
    assert (view.weights, view.non_framework, view.pool_limit, view.contiguous) == (0, 0, None, None)


def view(driver: dict[str, object], allocator: dict[str, int]) -> DeviceView:
    return DeviceView(
        name="card",
        driver=DriverView(**({"source": "NVML", "total": 100 * GIB, "free": 20 * GIB} | driver)),
        allocator=AllocatorView(**({"in_use": 10 * GIB, "peak": 12 * GIB} | allocator)),
    )


def test_free_bytes_of_the_pool_are_ours() -> None:
    full = view({"own": 80 * GIB}, {"limit": 79 * GIB, "pool": 79 * GIB, "largest_free": 60 * GIB})
    assert full.non_framework == GIB
    assert (full.pool_limit, full.contiguous, full.weights) == (79 * GIB, 60 * GIB, 10 * GIB)


def test_neighbours_are_not_billed_where_they_are_known() -> None:
    pool = {"limit": 60 * GIB, "pool": 60 * GIB, "largest_free": 50 * GIB}
    neighbour = (ProcessMemory(1, "other", 19 * GIB),)
    assert view({"own": 61 * GIB, "neighbours": neighbour}, pool).non_framework == GIB
    assert view({}, pool).non_framework == 20 * GIB  # told apart by nobody


def test_a_pool_that_can_still_grow() -> None:
    growing = view({"own": 13 * GIB}, {"limit": 75 * GIB, "pool": 12 * GIB, "largest_free": GIB})
    assert growing.pool_limit == 32 * GIB  # the card has 20 GiB left
    assert growing.contiguous == 20 * GIB


def test_a_pool_is_taken_with_the_first_array() -> None:
    """Until then it is empty, and its limit is what it will have, or what the others leave."""
    nothing = {"in_use": 0, "peak": 0}
    assert view({"own": GIB}, nothing | {"limit": 10 * GIB}).pool_limit == 10 * GIB
    assert view({"own": GIB}, nothing | {"limit": 10 * GIB}).contiguous == 10 * GIB
    assert view({"own": GIB}, nothing | {"limit": 75 * GIB}).pool_limit == 20 * GIB


def test_no_pool() -> None:
    """XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async reports zeros."""
    bare = view({"own": 11 * GIB, "free": 89 * GIB}, {})
    assert bare.non_framework == GIB
    assert (bare.pool_limit, bare.contiguous) == (99 * GIB, 89 * GIB)


def test_impossible_reading() -> None:
    with pytest.raises(ValueError, match="cannot have said"):
        DriverView(source="NVML", total=MIB, free=GIB)
