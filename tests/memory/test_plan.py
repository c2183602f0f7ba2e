"""The planner: figures of the specification, its options, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from jaxllm import plan
from jaxllm.engine.device_state import abstract_state
from jaxllm.memory.cards import CARDS
from jaxllm.memory.predict import Workload, activation_bytes, state_bytes, weight_bytes
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs, runtime_config
from jaxllm.models.shapes import SHAPES

SEVEN_B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MEASURED = [
    "--device-memory",
    "80GiB",
    "--weight-bytes",
    "14GiB",
    "--activation-bytes",
    "4GiB",
    "--other-bytes",
    "1GiB",
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert plan.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_shape_is_a_model_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = planned(capsys, "qwen3-8b", "--device", "h200")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    assert planned(capsys, str(folder), "--device", "h200") == by_name
    (folder / "config.json").write_text(json.dumps(SEVEN_B))
    folder.rename(tmp_path / "qwen3-8b")
    assert planned(capsys, "qwen3-8b", "--device", "h200") != by_name


def test_section_six(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = planned(capsys, model, *MEASURED, "--kvcache-block-size", "256", "--gpu-memory-utilization", "0.9")
    assert one["block_bytes"] == 14_680_064
    assert one["kv_cache_bytes"] == 53 << 30
    assert one["num_kvcache_blocks"] == 3876
    assert one["max_concurrency"] == 3876 / 16  # 16 blocks carry one request of 4,096 tokens
    four = planned(
        capsys,
        *["--model", model, "--device-memory", "80GiB", "--kvcache-block-size", "256", "--tensor-parallel-size", "4"],
        *["--weight-bytes", "3.5GiB", "--activation-bytes", "1GiB", "--other-bytes", "1GiB"],
    )
    assert (four["block_bytes"], four["kv_cache_bytes"], four["num_kvcache_blocks"]) == (
        3_670_016,
        int(66.5 * (1 << 30)),
        19_456,
    )


def test_three_questions(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [model, *MEASURED, "--kvcache-block-size", "256"]
    base = planned(capsys, *arguments)
    fp8 = planned(capsys, *arguments, "--kv-cache-dtype", "fp8")
    assert fp8["block_bytes"] == base["block_bytes"] / 2
    assert fp8["num_kvcache_blocks"] == 7753
    assert base["blocks_without_warm_up"] == (57 << 30) // 14_680_064
    assert plan.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "293 too many" in shown and "4.00 GiB that are gone" in shown
    rows = {cells[0]: cells for line in shown.splitlines() if (cells := line.split()) and cells[0] in ("2", "4")}
    # tp=2 more than doubles the blocks; what was measured is divided among the devices.
    assert rows["2"][5].replace(",", "") == str((62 << 30) // 7_340_032)
    assert rows["4"][5] == "19,456"


def test_decimal_and_binary_units(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = planned(capsys, model, "--device-memory", "80GB")
    assert small["device_memory"] == 80 * 10**9
    assert small["limit"] == 72 * 10**9


def test_predicted_weights_are_exact() -> None:
    config = ModelConfig.from_hf(SEVEN_B)
    layer = 4096 * (32 + 2 * 4) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    expected = 2 * (2 * 151936 * 4096 + 28 * layer + 4096)
    assert weight_bytes(config, itemsize=2) == expected
    sharded = sum(
        2 * spec.shape[0] * (spec.shape[1] if len(spec.shape) > 1 else 1) // (8 if any(spec.axes) else 1)
        for spec in parameter_specs(config, 8).values()
    )
    assert weight_bytes(config, itemsize=2, tensor_parallel_size=8) == sharded  # KV heads replicated, norms everywhere


def test_the_state_of_requests_is_predicted_and_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As many bytes as the engine allocates on each device, whatever pads the vocabulary."""
    for tp, config in ((8, SEVEN_B | {"vocab_size": 151_669}), (1, SEVEN_B)):
        shapes = ModelConfig.from_hf(config)
        allocated = abstract_state(512, 4096, runtime_config(shapes, tp).vocab_size)
        expected = sum(array.size * array.dtype.itemsize for array in allocated)
        assert state_bytes(shapes, rows=512, max_model_len=4096, tensor_parallel_size=tp) == expected
    made = planned(capsys, model, "--device", "h200", "--max-num-seqs", "512", "--max-model-len", "4096")
    assert made["predicted_state_bytes"] == expected
    assert made["weight_bytes"] == made["predicted_weight_bytes"] + expected


def test_activations_grow_with_what_they_depend_on() -> None:
    config = ModelConfig.from_hf(SEVEN_B)

    def predicted(tokens: int, rows: int, tp: int = 1) -> int:
        return activation_bytes(config, Workload(tokens, rows), itemsize=2, tensor_parallel_size=tp)

    assert predicted(32768, 64) > predicted(16384, 64) > predicted(16384, 64, tp=4)
    # Few tokens, many rows: the sampler's logits decide.
    assert predicted(1024, 1024) >= 1024 * 151936 * 4


COMPILED = [  # temporaries of the larger program, compiled for an H200 with the kernels
    ("qwen3-0.6b", 16384, 512, 676_924_544),
    ("qwen3-0.6b", 2048, 64, 193_397_896),
    ("qwen3-0.6b", 32768, 1024, 1_321_467_024),
    ("qwen3-8b", 16384, 256, 805_444_232),
    ("qwen3-8b", 2048, 512, 674_859_912),
    ("qwen3-14b", 8192, 64, 490_831_000),
    ("qwen3-14b", 32768, 512, 1_862_507_400),
]


@pytest.mark.parametrize(("shape", "tokens", "rows", "temporaries"), COMPILED)
def test_prediction_is_near_what_the_compiler_says(shape: str, tokens: int, rows: int, temporaries: int) -> None:
    config = ModelConfig.from_hf(SHAPES[shape])
    predicted = activation_bytes(config, Workload(tokens, rows, kernels=True), itemsize=2)
    assert predicted == pytest.approx(temporaries, rel=0.2)
    assert activation_bytes(config, Workload(tokens, rows), itemsize=2) > predicted


def test_the_kernels_are_planned_where_they_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def planned_for(card: str, *options: str) -> int:
        return int(planned(capsys, model, "--device", card, *options)["predicted_activation_bytes"])

    assert planned_for("H200") < planned_for("b200") == planned_for("l40s")
    assert planned_for("h200", "--dtype", "float32") == planned_for("b200", "--dtype", "float32")


def test_every_card(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert min(CARDS.values()) < 9 << 30 and CARDS["h200"] > 139 << 30
    codes = set()
    for name, size in CARDS.items():
        code = plan.main([model, "--device", name.upper(), "--json"])
        out = capsys.readouterr()
        made = json.loads(out.out)
        assert made["device_memory"] == size
        assert code == (1 if made["num_kvcache_blocks"] < 1 else 0)
        assert ("no memory for the KV cache" in out.err) == (code == 1)
        codes.add(code)
    assert codes == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h200"], "give one model"),
        (["MODEL"], "--device NAME or --device-memory"),
        (["MODEL", "--device", "h200", "--device-memory", "1GiB"], "--device NAME or --device-memory"),
        (["MODEL", "--device", "h300"], "h200"),
        (["MODEL", "--device", "h200", "--tensor-parallel-size", "3"], "Sizes that do: 1, 2, 4, 8"),
        (
            ["MODEL", "--device", "h200", "--gpu-memory-utilization", "1.5"],
            r"gpu_memory_utilization must be in \(0, 1\]",
        ),
        (["./nowhere", "--device", "h200"], "does not exist"),
    ],
)
def test_refusals(model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan.main([model if word == "MODEL" else word for word in arguments])
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_ambiguous_unit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main([model, "--device-memory", "80G"])
    assert "80GiB" in capsys.readouterr().err
