"""Converts a layout to the HybridTrainer that has it: as a call, and as text to copy.

build_trainer(shape, layout, model, loss_fn, optimizer)    inside the program of each rank
call_text(shape, layout)                                   a program: model, mesh, trainer
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from parallel101 import models
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout, entries_of_stages
from parallel101.trainers.hybrid import HybridTrainer

# the axes of a mesh: GPUs are numbered with the last one fastest
MESH_AXES = ("pp", "dp", "ep", "cp", "tp")
CALL = """\
import torch
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101

config = p101.models.{model}Config(
{config}
)
mesh = init_device_mesh(
    "cuda" if torch.cuda.is_available() else "cpu",
    {sizes},
    mesh_dim_names={names},
)
trainer = p101.HybridTrainer(
    p101.models.{model}(config),
    p101.{loss},
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    mesh=mesh,
{options}
)
"""


def mesh_of(layout: ParallelLayout) -> dict[str, int]:
    """Return the size of each axis by name, without axes of one rank; dp is always there."""
    sizes = {axis: getattr(layout, axis) for axis in MESH_AXES}
    return {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"}


def trainer_options(shape: ModelShape, layout: ParallelLayout) -> dict[str, Any]:
    """Return the arguments of HybridTrainer for this layout that differ from the defaults.

    Its mesh is left out.
    """
    options: dict[str, Any] = {"precision": layout.precision}
    if layout.gradient_dtype:
        options["gradient_dtype"] = torch.float32
    for name in ("zero_stage", "sequence_parallel", "recompute", "overlap"):
        if (value := getattr(layout, name)) != getattr(ParallelLayout, name):
            options[name] = value
    if layout.cp > 1 and layout.context != "zigzag":
        options["context"] = layout.context
    if layout.pp > 1:
        options["schedule"] = "interleaved" if layout.chunks > 1 else layout.schedule
        options["microbatches"] = layout.microbatches
        if layout.chunks > 1:
            options["chunks"] = layout.chunks
        stages = layout.pp * layout.chunks
        options["layers_per_stage"] = list(entries_of_stages(shape.layers, stages))
    elif layout.microbatches > 1:
        options["accumulate"] = layout.microbatches
    return options


def build_trainer(
    shape: ModelShape,
    layout: ParallelLayout,
    model: Any,
    loss_fn: Any,
    optimizer: Callable[..., Any],
    **others: Any,
) -> HybridTrainer:
    """Return the HybridTrainer of this layout. Every rank calls it.

    Args: others: options of HybridTrainer in addition, such as clip_norm.

    Raises ValueError if the number of ranks is another.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != layout.gpus:
        raise ValueError(
            f"the layout is for {layout.gpus:,} GPUs, and there are {ranks:,} ranks: expected as "
            "many. Plan again with this number of GPUs"
        )
    sizes = mesh_of(layout)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    options = trainer_options(shape, layout) | others
    return HybridTrainer(model, loss_fn, optimizer, mesh=mesh, **options)


def call_text(shape: ModelShape, layout: ParallelLayout) -> str:
    """Return the lines that build the model and the trainer on each rank; run them with torchrun.

    Raises ValueError if this package has no model of that shape.
    """
    model, config = model_and_config(shape)
    sizes, options = mesh_of(layout), trainer_options(shape, layout)
    lines = [
        "\n".join(f"    {name}={as_text(value)}," for name, value in values.items())
        for values in (config, options)
    ]
    return CALL.format(
        model=model,
        config=lines[0],
        sizes=as_text(tuple(sizes.values())),
        names=as_text(tuple(sizes)),
        loss="models.balanced_next_token_loss" if shape.experts else "vocabulary_cross_entropy",
        options=lines[1],
    )


def as_text(value: Any) -> str:
    """Return a value as Python code.

    Strings are in double quotes, and numbers that repeat are a product.
    """
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"({', '.join(map(as_text, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        runs = [(number, len(list(same))) for number, same in groupby(value)]
        return (
            f"[{', '.join(f'*[{n}] * {m}' if m > 3 else ', '.join([f'{n}'] * m) for n, m in runs)}]"
        )
    return str(value)  # torch.float32, too


def model_of(shape: ModelShape) -> nn.Module:
    """Return a model of that shape. Raises ValueError if there is none."""
    model, config = model_and_config(shape)
    return getattr(models, model)(getattr(models, f"{model}Config")(**config))


def model_and_config(shape: ModelShape) -> tuple[str, dict[str, Any]]:
    """Return the model's class, "GPT" or "Llama", and the arguments of its configuration.

    Raises ValueError if neither models.GPT nor models.Llama has this shape.
    """
    llama = shape.positions == "rotary"
    names = {"vocabulary": "vocabulary", "context": "time", "layers": "layers"}
    names |= {name: name for name in ("heads", "width", "tied")}
    config: dict[str, Any] = {ours: getattr(shape, name) for ours, name in names.items()}
    had: dict[str, tuple[Any, ...]] = {
        "norm": ("rms" if llama else "layer",),
        "gated": (llama,),
        "biases": (not llama,),
    }
    if llama:
        model, had = "Llama", had | {"experts": (0,), "dropout": (False,)}
        config |= {"kv_heads": shape.kv, "hidden": shape.inside}
    else:
        model = "GPT"
        had |= {"kv_heads": (None, shape.heads), "feed_forward": (None, 4 * shape.width)}
        config |= {"experts": shape.experts, "top_k": shape.top_k} if shape.experts else {}
    for name, values in had.items():
        if (value := getattr(shape, name)) not in values:
            raise ValueError(
                f"this package's {model} (positions={shape.positions!r}) has no {name}={value!r}: "
                f"expected {' or '.join(map(repr, values))} to build and run it"
            )
    config |= {"attention": shape.attention} if shape.attention != "fused" else {}
    return model, config | ({"dropout": 0.1} if shape.dropout else {})


def why_no_model(shape: ModelShape) -> str | None:
    """Return why neither models.GPT nor models.Llama has this shape, or None if one does."""
    try:
        model_and_config(shape)
    except ValueError as error:
        return str(error)
    return None
