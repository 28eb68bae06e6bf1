"""Converts a layout to the HybridTrainer that has it.

trainer_options(shape, layout)    the arguments of its call
call_text(shape, layout)          a program to copy: model, mesh, trainer
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import nn

from parallel101 import models
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout, stage_layers

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
    names = ["zero_stage", "sequence_parallel", "recompute", "overlap", "chunks"]
    names += ["context"] * (layout.cp > 1)
    options: dict[str, Any] = {"precision": layout.precision}
    for name in names:
        if (value := getattr(layout, name)) != getattr(ParallelLayout, name):
            options[name] = value
    if layout.gradient_dtype:
        options["gradient_dtype"] = torch.float32
    if layout.pp > 1:
        options["schedule"] = "interleaved" if layout.chunks > 1 else layout.schedule
        options["microbatches"] = layout.microbatches
        entries = list(stage_layers(shape.layers, layout.pp * layout.chunks))
        entries[0] += 1  # the embedding
        entries[-1] += 2  # the norm and the head
        options["layers_per_stage"] = entries
    elif layout.microbatches > 1:
        options["accumulate"] = layout.microbatches
    return options


def call_text(shape: ModelShape, layout: ParallelLayout) -> str:
    """Return the lines that build the model and the trainer on each rank; run them with torchrun.

    Raises ValueError if this package has no model of that shape.
    """
    model, config = model_and_config(shape)
    sizes, options = mesh_of(layout), trainer_options(shape, layout)
    config_lines, option_lines = (
        "\n".join(f"    {name}={as_text(value)}," for name, value in values.items())
        for values in (config, options)
    )
    loss = "models.balanced_next_token_loss" if shape.experts else "vocabulary_cross_entropy"
    names, counts = (as_text(tuple(of)) for of in (sizes, sizes.values()))
    return CALL.format(
        model=model, config=config_lines, sizes=counts, names=names, loss=loss, options=option_lines
    )


def as_text(value: Any) -> str:
    """Return a value as Python code: in a list, numbers that repeat are a product."""
    if isinstance(value, list):
        runs = [(number, len(list(same))) for number, same in groupby(value)]
        parts = [f"*[{n}] * {m}" if m > 3 else ", ".join([f"{n}"] * m) for n, m in runs]
        return f"[{', '.join(parts)}]"
    return repr(value).replace("'", '"')


def model_of(shape: ModelShape) -> nn.Module:
    """Return a model of that shape. Raises ValueError if there is none."""
    model, config = model_and_config(shape)
    return getattr(models, model)(getattr(models, f"{model}Config")(**config))


def model_and_config(shape: ModelShape) -> tuple[str, dict[str, Any]]:
    """Return the model's class, "GPT" or "Llama", and the arguments of its configuration.

    Raises ValueError if neither models.GPT nor models.Llama has this shape.
    """
    llama = shape.positions == "rotary"
    model = "Llama" if llama else "GPT"
    # what the class can't have otherwise
    fixed: dict[str, tuple[Any, ...]] = {"norm": ("rms" if llama else "layer",), "gated": (llama,)}
    fixed["biases"] = (not llama,)
    if llama:
        fixed |= {"experts": (0,), "dropout": (False,)}
    else:
        fixed |= {"kv_heads": (None, shape.heads), "feed_forward": (None, 4 * shape.width)}
    for name, values in fixed.items():
        if (value := getattr(shape, name)) not in values:
            raise ValueError(
                f"this package's {model} (positions={shape.positions!r}) has no {name}={value!r}: "
                f"expected {' or '.join(map(repr, values))} to build and run it"
            )
    config: dict[str, Any] = {"vocabulary": shape.vocabulary, "context": shape.time}
    config |= {name: getattr(shape, name) for name in ("layers", "heads", "width", "tied")}
    config |= {"kv_heads": shape.kv, "hidden": shape.inside} if llama else {}
    config |= {"experts": shape.experts, "top_k": shape.top_k} if shape.experts else {}
    config |= {"attention": shape.attention} if shape.attention != "fused" else {}
    return model, config | ({"dropout": 0.1} if shape.dropout else {})


def why_no_model(shape: ModelShape) -> str | None:
    """Return why neither models.GPT nor models.Llama has this shape, or None if one does."""
    try:
        model_and_config(shape)
    except ValueError as error:
        return str(error)
    return None
