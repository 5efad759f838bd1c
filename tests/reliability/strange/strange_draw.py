"""What a strange model is made of, drawn at random."""

import math
import random
from dataclasses import dataclass, replace

from reliability.strange.strange_parts import KINDS, KINKED, SMOOTH, Block, output_shape


@dataclass(frozen=True)
class Plan:
    """A model, its data and how it is trained and measured.

    Attributes:
        shape: of one sample, of its embedding where there is a vocabulary.
        blocks: the last one is the head.
        turn: the block in front of which positions are collapsed into features.
        second_input: the number of features of a second input, which joins in front of the head.
        join: how: ``"cat"``, or where it has as many features ``"add"`` or ``"times"``.
        buffer: ``"counted"``: a buffer that every forward pass changes; ``"used"``: the output also depends on it.
        outer: parameters outside of layers.
        remembers: whether the step changes attributes and a metric.
        probe: samples that are measured on.
        precision: of the trainer; the weights and the data are in double precision either way.
        options: of `NormTheory`.
    """

    shape: tuple[int, ...]
    vocabulary: int
    embedding_norm: str
    embedding_dim: int | None
    blocks: tuple[Block, ...]
    turn: int
    collapse: str
    second_input: int
    join: str
    outputs: int
    zero_head: bool
    loss: str
    regularized: bool
    dict_batches: bool
    returns: str
    optimizer: str
    lr: float
    manual: bool
    remembers: bool
    buffer: str
    outer: bool
    samples: int
    batch_size: int
    drop_last: bool
    validation: int
    validation_batch: int
    probe: int
    precision: str
    epochs: int
    options: dict

    def __str__(self) -> str:
        words = [f"x {self.shape}", *map(str, self.blocks), f"collapse {self.collapse}@{self.turn}", self.loss]
        words += [f"embedding {self.vocabulary} {self.embedding_norm} {self.embedding_dim}"] if self.vocabulary else []
        flags = ("zero_head", "regularized", "dict_batches", "manual", "remembers", "outer", "drop_last")
        words += [flag for flag in flags if getattr(self, flag)]
        words += [f"second input {self.second_input} {self.join}"] if self.second_input else []
        words += [f"buffer {self.buffer}"] if self.buffer else []
        words += [f"returns {self.returns}", f"{self.optimizer} {self.lr}", f"n {self.samples}/{self.batch_size}"]
        return "; ".join(
            [
                *words,
                f"validation {self.validation}",
                f"probe {self.probe}",
                self.precision,
                f"{self.epochs} epochs",
                str(self.options),
            ]
        )

    @property
    def norms(self) -> set[str]:
        return {block.norm for block in self.blocks}

    @property
    def twice_differentiable(self) -> bool:
        return all(block.activation != "cube" for block in self.blocks)

    @property
    def tracked(self) -> bool:
        """Whether every BatchNorm has running statistics."""
        return all(block.batch_norm[1] for block in self.blocks if block.norm == "batch")


def draw(rng: random.Random) -> Plan:
    axes = rng.choice((1, 1, 2, 2, 3))
    shape = {1: (rng.randint(1, 5),), 2: (rng.randint(1, 3), rng.randint(2, 4)), 3: (rng.randint(1, 2), 3, 3)}[axes]
    depth = rng.randint(1, 4)
    turn = min(rng.randint(1, 2), depth - 1) if axes > 1 else 0
    collapse = rng.choice(("flatten", "mean"))
    loss = rng.choice(("square", "mse", "cross entropy", "logistic"))
    outputs = rng.randint(2 if loss == "cross entropy" else 1, 4)
    blocks, features = _blocks(rng, shape, depth, turn, collapse, outputs)
    vocabulary = rng.randint(3, 5) if axes == 2 and rng.random() < 0.4 else 0
    samples = rng.randint(8, 13)
    batch_size = rng.choice((3, 4, 5, 7, samples))
    coupled = any(block.norm == "batch" for block in blocks)
    tracked = all(block.batch_norm[1] for block in blocks if block.norm == "batch")
    validation = rng.randint(2, 9) if rng.random() < 0.6 else 0
    plan = Plan(
        shape=shape,
        vocabulary=vocabulary,
        embedding_norm=rng.choice(("", "hook", "parametrized")) if vocabulary else "",
        embedding_dim=rng.choice((0, 1, None)),
        blocks=blocks,
        turn=turn,
        collapse=collapse,
        second_input=rng.choice((features, features, rng.randint(1, 3))) if rng.random() < 0.15 else 0,
        join=rng.choice(("cat", "add", "times")),
        outputs=outputs,
        zero_head=blocks[-1].norm == "none" and rng.random() < 0.15,
        loss=loss,
        regularized=rng.random() < 0.2,
        dict_batches=rng.random() < 0.15,
        returns=rng.choice(("tensor", "tensor", "tensor", "tensor", "dict", "tuple")),
        optimizer=rng.choice(("sgd", "momentum", "adam", "groups")),
        lr=rng.choice((0.01, 0.03)),
        manual=rng.random() < 0.1,
        remembers=rng.random() < 0.4,
        buffer=rng.choice(("", "", "", "counted", "used")),
        outer=rng.random() < 0.2,
        samples=samples,
        batch_size=batch_size,
        drop_last=coupled and samples % batch_size == 1,  # a BatchNorm cannot train on one sample
        validation=validation,
        validation_batch=rng.randint(2, 5) if tracked else max(validation, 1),
        probe=rng.choice((512, 512, 512, 7)),
        precision=rng.choice(("32-true", "64-true")),
        epochs=rng.choice((1, 2)),
        options=_options(rng, coupled and tracked),
    )
    return _as_chain(plan, rng) if rng.random() < 0.25 else plan


def _as_chain(plan: Plan, rng: random.Random) -> Plan:
    """A smooth chain of layers and a square loss: what the constants of the theorems are for."""
    blocks = tuple(
        replace(
            block,
            kind="linear" if block.kind == "linear" else "conv",
            norm=block.norm if block.norm in ("hook", "parametrized") else "none",
            tensor="weight",
            activation="none" if block is plan.blocks[-1] else rng.choice(SMOOTH),
            frozen=block.frozen if block.norm in ("hook", "parametrized") else "",
            **dict.fromkeys(("residual", "twice", "tied", "checkpointed"), False),
        )
        for block in plan.blocks
    )
    simple = {"vocabulary": 0, "embedding_norm": "", "second_input": 0, "buffer": "", "drop_last": False}
    simple |= {"regularized": False, "dict_batches": False, "outer": False}
    options = {**plan.options, "batch_stats": None}
    return replace(plan, blocks=blocks, loss=rng.choice(("square", "mse")), options=options, **simple)


def _options(rng: random.Random, choice: bool) -> dict:
    return {
        "ntk_outputs": rng.choice(("trace", "trace", "full", "sum")),
        "ntk_samples": rng.choice((128, 128, 5)),
        "hessian_method": rng.choice(("lanczos", "power")),
        "memory": rng.choice(("high", "low")),
        "batch_stats": rng.choice((None, None, True, False)) if choice else None,
    }


def collapsed(shape: tuple[int, ...], how: str) -> tuple[int, ...]:
    """Positions become features, or are averaged away."""
    return (math.prod(shape),) if how == "flatten" else shape[:1]


def _blocks(
    rng: random.Random, shape: tuple[int, ...], depth: int, turn: int, collapse: str, outputs: int
) -> tuple[tuple[Block, ...], int]:
    """The blocks, and how many features enter the last one."""
    blocks: list[Block] = []
    entering: list[tuple[int, ...]] = []
    for index in range(depth - 1):
        if index == turn:
            shape = collapsed(shape, collapse)
        block = _block(rng, rng.choice(KINDS[len(shape)]), shape)
        tied = index > 0 and _can_be_tied(blocks[-1], entering[-1], shape) and rng.random() < 0.5
        if tied:
            block = replace(block, norm=rng.choice(("none", "batch")), width=blocks[-1].width, tied=True, frozen="")
        blocks.append(block)
        entering.append(shape)
        shape = output_shape(block, shape)
    features = (collapsed(shape, collapse) if turn == depth - 1 else shape)[0]
    return (*blocks, _head(rng, outputs)), features


def _can_be_tied(before: Block, entered: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    square = before.kind == "linear" and entered == shape
    return square and before.norm not in ("hook", "parametrized", "spectral")


def _head(rng: random.Random, outputs: int) -> Block:
    norm = rng.choice(("none", "none", "hook", "parametrized"))
    frozen = rng.choice(("", "", "g", "v")) if norm != "none" else ""
    bias = rng.random() < 0.7
    return Block("linear", outputs, norm, rng.choice((0, 1, None)), activation="none", bias=bias, frozen=frozen)


def _block(rng: random.Random, kind: str, shape: tuple[int, ...]) -> Block:
    named = kind in ("lstm", "gru", "attention")  # whose weights have names of their own
    norm = rng.choice(
        ("none", "hook", "parametrized", "batch", "batch", "layer", *(() if named else ("group", "spectral")))
    )
    tensor = rng.choice(("weight_hh_l0", "weight_ih_l0")) if named else "weight"
    if kind == "attention":
        # out_proj is never called itself: the hook of the older form would not run.
        tensor = "in_proj_weight" if norm == "hook" else rng.choice(("in_proj_weight", "out_proj"))
    frozen = rng.choice(("", "", "", "g", "v")) if norm in ("hook", "parametrized") else ""
    if norm in ("none", "batch"):
        frozen = rng.choice(("", "", "", "", "", "layer"))
    again = kind != "transposed" and rng.random() < 0.35  # then it must return what it takes
    return Block(
        kind,
        shape[0] if again else rng.randint(1, 4),
        norm,
        rng.choice((0, 1, None, -1, -2)),
        tensor,
        (rng.random() < 0.7, rng.random() < 0.7, rng.choice((0.1, 0.5, None))),
        "cube" if rng.random() < 0.04 else rng.choice(SMOOTH if named else (*SMOOTH, *KINKED)),
        rng.random() < 0.7,
        rng.choice((0.0, 0.0, 0.3)),
        residual=again and rng.random() < 0.6,
        twice=again and rng.random() < 0.5,
        checkpointed=rng.random() < 0.1,
        frozen=frozen,
    )
