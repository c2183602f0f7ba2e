"""The chains of projections that are measured: models, parts of a layer, and selections of them."""

import dataclasses

import numpy as np

from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.tuned import CUT_QKV, GATE_UP, PROJECT, QKV, qkv_config


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
PARTS = {"qkv": ("qkv",), "o": ("o",), "down": ("down",), "attention": ("qkv", "o"), "mlp": ("gate_up", "down")}
PARTS["layer"] = PARTS["step"] = PARTS["attention"] + PARTS["mlp"]
"""The projections of each chain. A step has the paged attention, the output layer and argmax besides."""


BLOCK = 64
"""Tokens of a cache block."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured chain: `rows` decode rows (padded to 8, 16 or 32 tokens for the kernels) through a part of a model.

    `context` is the rows' context in a `step`, `qkv` the configuration for the model where none is given.
    """

    model: str
    part: str
    rows: int
    context: int = 512
    qkv: StreamConfig | None = None
    project: StreamConfig = PROJECT
    gate_up: StreamConfig = GATE_UP
    compare: bool = True

    @property
    def name(self) -> str:
        """Model, part and rows, and what is not the default."""
        name = f"{self.model} {self.part} {self.rows}"
        for label, config, default in (
            ("qkv", self.qkv, None), ("project", self.project, PROJECT), ("gate_up", self.gate_up, GATE_UP),
        ):  # fmt: skip
            if config is not None and config != default:
                name += f" {label} "
                name += f"p{config.pieces}" if label == "qkv" else f"r{config.rows}"
                name += f" s{config.splits} {config.step}x{config.stages}"
                name += " early" * config.early_start
        return name

    @property
    def tokens(self) -> int:
        """Tokens the kernels compute."""
        return next(size for size in (8, 16, 32) if size >= self.rows)

    @property
    def xla(self) -> bool:
        """Whether XLA is measured too.

        Alone, qkv, o and down need nothing from the call before but the cache, or what is added at last: XLA would move
        its products out of the loop.
        """
        return self.compare and self.part not in ("qkv", "o", "down")

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
        model = self.sizes
        qkv = qkv_config(hidden=model.hidden, heads=model.heads + 2 * model.kv_heads, head_dim=model.head_dim)
        qkv, project, gate_up = (
            dataclasses.replace(config, early_start=True) for config in (self.qkv or qkv, self.project, self.gate_up)
        )
        return dataclasses.replace(self, compare=False, qkv=qkv, project=project, gate_up=gate_up)


POINTS = tuple(Point("0.6B", part, rows) for part in PARTS for rows in (1, 8)) + tuple(
    Point("8B", part, rows) for part in ("qkv", "o", "down", "attention", "mlp", "layer") for rows in (1, 32)
)

QUICK = (
    *(Point("0.6B", part, 1) for part in ("o", "down", "attention", "mlp")),
    *(Point("0.6B", part, rows) for part in ("layer", "step") for rows in (1, 8)),
    Point("0.6B", "step", 1).early(),
    Point("0.6B", "layer", 16),
    *(Point("8B", part, 8) for part in ("qkv", "o", "down", "attention", "mlp")),
)


def cut(model: str, rows: int, pieces: int, ring: StreamConfig) -> Point:
    """The projections of q, k and v alone, heads cut into pieces."""
    return Point(model, "qkv", rows, context=BLOCK, qkv=dataclasses.replace(ring, pieces=pieces), compare=False)


WIDE_PROJECT = StreamConfig(rows=32, splits=4, step=128, stages=4)
"""One thread block a multiprocessor, which reads the tokens half as often."""

TUNE = (
    # `QKV` fills a multiprocessor's shared memory, of `CUT_QKV` two thread blocks do.
    *(cut("8B", 8, pieces, ring) for pieces in range(1, 7) for ring in (QKV, CUT_QKV)),
    *(cut("8B", rows, pieces, QKV) for rows in (1, 32) for pieces in (1, 2)),
    *(cut("8B", rows, pieces, CUT_QKV) for rows in (1, 32) for pieces in range(2, 7)),
    *(cut("0.6B", rows, 1, QKV) for rows in (1, 8)),
    *(cut("0.6B", rows, pieces, ring) for rows in (1, 8) for pieces in (2, 4) for ring in (QKV, CUT_QKV)),
    *(
        Point("8B", part, rows, project=project, compare=False)
        for part in ("o", "down")
        for rows, projects in (
            (8, (PROJECT, WIDE_PROJECT, dataclasses.replace(WIDE_PROJECT, step=64, stages=8))),
            (32, (PROJECT, dataclasses.replace(WIDE_PROJECT, splits=2, stages=6))),
        )
        for project in projects
    ),
    *(
        Point("8B", "mlp", rows, gate_up=gate_up, compare=False)
        for rows in (8, 32)
        for gate_up in (
            GATE_UP,
            StreamConfig(rows=32, splits=2, step=64, stages=4),
            StreamConfig(rows=48, splits=2, step=64, stages=3),
            StreamConfig(rows=48, splits=1, step=64, stages=5),
            StreamConfig(rows=96, splits=1, step=64, stages=6),
        )
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
