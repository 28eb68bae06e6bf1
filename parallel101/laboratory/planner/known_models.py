"""The shape of a model to plan for: by name, from a JSON file, or from five numbers.

    "llama-3-70b"              one of KNOWN_MODELS
    "12288,96,96,51200,2048"   width, layers, heads, vocabulary, time of a GPT
    "model.json"               the fields of ModelShape, such as {"width": 4096, "layers": 32, …}
    "config.json"              of a LLaMA on Hugging Face: it has "model_type": "llama"

Hugging Face's keys are those of LlamaConfig in transformers,
src/transformers/models/llama/configuration_llama.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from parallel101.cost.model_shape import ModelShape

# what LLaMAs have in common
LLAMA: dict[str, Any] = {"gated": True, "norm": "rms", "positions": "rotary"}
LLAMA |= {"biases": False, "tied": False}
# "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3; vocabulary: their tokenizer's 128,000
# tokens and 256 special ones; time: section 3.4.1, before the context is extended
LLAMA_3 = ModelShape(4096, 32, 32, 128256, 8192, 8, 14336, **LLAMA, name="llama-3-8b")
LLAMA_3_70B = replace(
    LLAMA_3, width=8192, layers=80, heads=64, feed_forward=28672, name="llama-3-70b"
)
LLAMA_3_405B = replace(
    LLAMA_3, width=16384, layers=126, heads=128, feed_forward=53248, name="llama-3-405b"
)
# "Language Models are Few-Shot Learners" (arXiv 2005.14165), table 2.1; vocabulary: GPT-2's
GPT_3 = ModelShape(12288, 96, 96, 50257, 2048, name="gpt3-175b")

KNOWN_MODELS = {shape.name: shape for shape in (LLAMA_3, LLAMA_3_70B, LLAMA_3_405B, GPT_3)}
# samples of a step, where a source has a number: Narayanan et al. (arXiv 2104.04473), table 1
BATCHES = {GPT_3.name: 1536}

# Hugging Face's key → ModelShape's
HUGGING_FACE = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "feed_forward",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "time",
    "tie_word_embeddings": "tied",
}
NUMBERS = ("width", "layers", "heads", "vocabulary", "time")


def shape_of_model(
    model: str | Path | Mapping[str, Any] | ModelShape,
    *,
    time: int | None = None,
    attention: str = "fused",
) -> ModelShape:
    """Return the shape of `model`.

    Args:
        model: a name in KNOWN_MODELS, the path of a JSON file, "h,L,a,V,s", the fields of a
            ModelShape, or a ModelShape.
        time: tokens of a sample, in place of the model's own.
        attention: "fused" or "unfused", in place of the model's own, unless `model` is a
            ModelShape.

    Raises ValueError, in words, for anything else.
    """
    if attention not in ("fused", "unfused"):
        raise ValueError(f'attention={attention!r}: expected "fused" or "unfused"')
    if isinstance(model, ModelShape):
        shape = model
    elif (known := KNOWN_MODELS.get(str(model).casefold())) is not None:
        shape = replace(known, attention=attention)
    else:
        values, where = (model, "the model") if isinstance(model, Mapping) else read(str(model))
        try:
            shape = replace(ModelShape(**fields_of(values)), attention=attention)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{where}: {error}") from None
    return shape if time is None else replace(shape, time=time)


def read(text: str) -> tuple[Mapping[str, Any], str]:
    """Return the fields that a text gives, five numbers or the path of a file, and whose they are.

    Raises ValueError for anything else, and for a file that can't be read or isn't a JSON object.
    """
    where, path, numbers = f"the model {text!r}", Path(text), text.split(",")
    if len(numbers) == len(NUMBERS) and all(part.strip().isdecimal() for part in numbers):
        return dict(zip(NUMBERS, map(int, numbers))), where
    if path.suffix != ".json" and not path.is_file():
        raise ValueError(
            f"{where} is unknown: expected one of {', '.join(KNOWN_MODELS)}; a JSON file; or five "
            f"whole numbers h,L,a,V,s ({', '.join(NUMBERS)}), such as 12288,96,96,51200,2048"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # of the file, of the encoding, or of JSON
        raise ValueError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object with a model's keys")
    return {"name": path.stem, **found}, str(path)


def fields_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a ModelShape, also from the config.json of a LLaMA on Hugging Face.

    Raises ValueError for unknown and for missing keys, and for other kinds of models, whose layers
    aren't those of models/llama.py.
    """
    if "model_type" not in values and "hidden_size" not in values:
        allowed = {field.name: field.default for field in fields(ModelShape)}
        needed = [name for name, default in allowed.items() if default is MISSING]
        unknown = [f"the unknown key {key!r}" for key in sorted(values) if key not in allowed]
        others = ", ".join(name for name in allowed if name not in needed)
        check_keys(values, needed, f"and, if they differ from a GPT's, {others}", unknown)
        return values
    if (kind := values.get("model_type", "llama")) != "llama":
        raise ValueError(
            f'a {kind!r} of Hugging Face; expected "llama", or the fields of ModelShape '
            f"({', '.join(NUMBERS)}, …)"
        )
    # what LlamaConfig has if a key is missing, apart from sizes, which every file has
    given = {"num_key_value_heads": None, "tie_word_embeddings": False, **values}
    check_keys(given, HUGGING_FACE, "as in the config.json of a LLaMA")
    sizes = {ours: given[key] for key, ours in HUGGING_FACE.items()}
    head = sizes["width"] // sizes["heads"]
    for key, expected in {"head_dim": head, "attention_bias": False, "mlp_bias": False}.items():
        if (value := given.get(key) or expected) != expected:
            raise ValueError(
                f"{key}={value!r}: expected {expected!r}, as other LLaMAs aren't known"
            )
    name = str(given.get("_name_or_path", "")).rpartition("/")[2]
    return {**LLAMA, **sizes, "name": name or given.get("name", "")}


def check_keys(
    values: Mapping[str, Any], needed: Iterable[str], others: str, wrong: Sequence[str] = ()
) -> None:
    """Raise ValueError if something is `wrong`, or one of the needed keys is missing."""
    if wrong := [*wrong, *(f"no {key!r}" for key in needed if key not in values)]:
        raise ValueError(f"{wrong[0]}; expected {', '.join(needed)}, {others}")
