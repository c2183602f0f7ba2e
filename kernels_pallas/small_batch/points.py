"""The chains of projections that are measured: models, parts of a layer, and selections of them."""

import dataclasses

import numpy as np

from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.tuned import GATE_UP, PROJECT, QKV


@dataclasses.dataclass(frozen=True)
class Model:
    """Shapes of a model. `layers` is how many have weights of their own in the measurement."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int = 151936
    head_dim: int = 128


MODELS = {"0.6B": Model(1024, 3072, 16, 8, layers=28), "8B": Model(4096, 12288, 32, 8, layers=6)}
PARTS = {"o": ("o",), "down": ("down",), "attention": ("qkv", "o"), "mlp": ("gate_up", "down")}
PARTS["layer"] = PARTS["step"] = PARTS["attention"] + PARTS["mlp"]
"""The projections of each chain. A step has the paged attention, the output layer and argmax besides."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured chain: `rows` decode rows (padded to 8, 16 or 32 tokens for the kernels) through a part of a model.

    `context` is the rows' context in a `step`.
    """

    model: str
    part: str
    rows: int
    context: int = 512
    qkv: StreamConfig = QKV
    project: StreamConfig = PROJECT
    gate_up: StreamConfig = GATE_UP
    compare: bool = True

    @property
    def name(self) -> str:
        """Model, part and rows, and what is not the default."""
        name = f"{self.model} {self.part} {self.rows}"
        for label, config, default in (
            ("qkv", self.qkv, QKV), ("project", self.project, PROJECT), ("gate_up", self.gate_up, GATE_UP),
        ):  # fmt: skip
            if config != default:
                name += f" {label} r{config.rows} s{config.splits} {config.step}x{config.stages}"
                name += " early" * config.early_start
        return name

    @property
    def tokens(self) -> int:
        """Tokens the kernels compute."""
        return next(size for size in (8, 16, 32) if size >= self.rows)

    @property
    def xla(self) -> bool:
        """Whether XLA is measured too.

        Alone, o and down need nothing from the call before but what is added at last: XLA would move its products out
        of the loop.
        """
        return self.compare and self.part not in ("o", "down")

    @property
    def sizes(self) -> Model:
        """The model's shapes."""
        return MODELS[self.model]

    @property
    def layer_bytes(self) -> int:
        """Bytes of weights a layer of the chain reads."""
        return sum(2 * int(np.prod(shape)) for name in PARTS[self.part] for shape in weight_shapes(self.sizes)[name])

    def early(self) -> "Point":
        """The same with kernels that let the next one start early."""
        early = {
            name: dataclasses.replace(getattr(self, name), early_start=True) for name in ("qkv", "project", "gate_up")
        }
        return dataclasses.replace(self, compare=False, **early)


POINTS = tuple(Point("0.6B", part, rows) for part in PARTS for rows in (1, 8)) + tuple(
    Point("8B", part, rows) for part in ("o", "down", "attention", "mlp", "layer") for rows in (1, 32)
)
QUICK = (
    *(Point("0.6B", part, 1) for part in ("o", "down", "attention", "mlp")),
    *(Point("0.6B", part, rows) for part in ("layer", "step") for rows in (1, 8)),
    Point("0.6B", "step", 1).early(),
    Point("0.6B", "layer", 16),
    *(Point("8B", part, 8) for part in ("o", "down", "attention", "mlp")),
)
TUNE = (
    *(
        Point("0.6B", part, 8, project=StreamConfig(rows=rows, splits=splits, step=step, stages=stages), compare=False)
        for part in ("o", "down")
        for rows, splits, step, stages in ((16, 4, 64, 6), (16, 8, 64, 4), (16, 2, 128, 4), (32, 4, 128, 3))
    ),
    *(
        Point("0.6B", "mlp", 8, gate_up=StreamConfig(rows=rows, splits=splits, step=step, stages=stages), compare=False)
        for rows, splits, step, stages in (
            (32, 2, 64, 4),
            (32, 4, 64, 3),
            (16, 4, 64, 4),
            (32, 1, 128, 3),
            (64, 2, 64, 4),
        )
    ),
    *(
        Point("0.6B", "attention", 8, qkv=StreamConfig(splits=splits, step=step, stages=stages), compare=False)
        for splits, step, stages in ((1, 64, 7), (1, 128, 3), (2, 64, 3))
    ),
    *(
        Point("8B", "down", 8, project=StreamConfig(rows=rows, splits=splits, step=step, stages=stages), compare=False)
        for rows, splits, step, stages in ((16, 4, 64, 4), (32, 4, 64, 4), (32, 2, 128, 4))
    ),
    *(
        Point("8B", "mlp", 8, gate_up=StreamConfig(rows=rows, splits=splits, step=step, stages=stages), compare=False)
        for rows, splits, step, stages in ((32, 2, 64, 4), (32, 4, 64, 4), (32, 1, 128, 3), (64, 1, 64, 4))
    ),
)


def weight_shapes(model: Model) -> dict[str, tuple[tuple[int, int], ...]]:
    """Shapes of the matrices of each projection."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "qkv": ((q, model.hidden), (kv, model.hidden), (kv, model.hidden)),
        "o": ((model.hidden, q),),
        "gate_up": ((model.mlp, model.hidden), (model.mlp, model.hidden)),
        "down": ((model.hidden, model.mlp),),
    }
