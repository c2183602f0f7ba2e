"""Profiles: what a device did is told from the intervals on its streams."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxllm.bench.trace import device_activity, latest, tracing

# Picoseconds: stream 1 runs [0, 100] and [100, 150] us, stream 2 [120, 200] us, and again [300, 400]; 300 of 400 us.
PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" } }
  lines { name: "Stream #1(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 100000000 }
    events { metadata_id: 1 offset_ps: 100000000 duration_ps: 50000000 } }
  lines { name: "Stream #2(Compute)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 300000000 duration_ps: 100000000 }
    events { metadata_id: 2 offset_ps: 120000000 duration_ps: 80000000 } }
  lines { name: "XLA Ops" timestamp_ns: 0 events { metadata_id: 1 offset_ps: 0 duration_ps: 900000000 } }
}
planes { name: "/device:GPU:1" }
planes { name: "/host:CPU" lines { name: "Stream #1" events { metadata_id: 1 duration_ps: 5 } } }
"""


def test_busy_time_is_the_union_of_the_streams() -> None:
    (activity,) = device_activity(jax.profiler.ProfileData.from_text_proto(PROFILE))
    assert activity.device == "/device:GPU:0"
    assert activity.seconds == pytest.approx(400e-6)
    assert activity.busy_share == pytest.approx(0.75)
    assert {name: (n, pytest.approx(s)) for name, (n, s) in activity.kernels.items()} == {
        "gemm": (2, 150e-6),
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": (2, 180e-6),
    }


def test_a_profile_of_a_cpu_has_files_and_no_devices(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no profile"):
        latest(tmp_path)
    with tracing(tmp_path, perfetto=True):
        jnp.ones(3).sum().block_until_ready()
    file = latest(tmp_path)
    assert file.with_name("perfetto_trace.json.gz").exists()
    assert device_activity(jax.profiler.ProfileData.from_file(str(file))) == []
