"""The page that says whether a model fits into the memory of a GPU.

    memory_rules.js     bytes on each rank, and which layouts there are: those of cost.step_memory
    memory_changes.js   the changes that would make it fit, and what they cost, roughly
    memory_page.js      the settings, their address, the code to copy
    memory_answer.js    the verdict, the bars, the words, the table

Models, GPUs and constants come from this package's tables. What can be read without a script is
written here, with the memory of the layout with which the page opens.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files

from parallel101.cost.hardware import CHIPS, Chip, Level, Torus
from parallel101.cost.layer_activations import RECOMPUTE
from parallel101.cost.model_shape import KNOWN, ModelShape
from parallel101.cost.parallel_layout import AVERAGES, ParallelLayout
from parallel101.cost.software import TRAINERS
from parallel101.cost.step_memory import BUCKET, MASTER, MOMENT, PARTS, step_memory
from parallel101.laboratory.planner.known_models import KNOWN_MODELS
from parallel101.laboratory.planner.layout_rules import CHOICES
from parallel101.laboratory.record.units import decimal_bytes

ADDRESS, TITLE = "does_it_fit.html", "Does it fit?"
# what the page opens with: a small model on the GPUs of one node
START = "llama-3-8b", "H100", ParallelLayout(dp=8, microbatches=4)
# a model of the reader's own numbers begins as the smallest GPT-2, which has tied weights
OWN = ModelShape(width=768, layers=12, heads=12, vocabulary=50257, time=1024)
KINDS = {"GPT": "gpt3-175b", "Llama": "llama-3-8b"}  # a model of each kind
KIND_FIELDS = "gated", "norm", "biases", "positions"
FLAGS = "gated", "biases", "tied", "dropout"


def _file(name: str) -> str:
    return files("parallel101.laboratory.publish.tools").joinpath(name).read_text(encoding="utf-8")


def _levels(chip: Chip) -> tuple[Level, ...]:
    """From the inside out; none of a TPU."""
    return () if isinstance(chip.links, Torus) else chip.links


GPUS = {name: chip for name, chip in CHIPS.items() if _levels(chip)}


def _gpu(chip: Chip) -> dict[str, float]:
    """The figures with which the page computes."""
    inside, *outside = _levels(chip)
    return {
        "memory": chip.hbm_bytes,
        "flops": chip.flops,
        "bandwidth": chip.hbm_bandwidth,
        "node": inside.size,
        "inside": inside.bandwidth,
        "network": outside[0].rail_bandwidth,
    }


def _given() -> str:
    """What the script takes from Python's tables."""
    shapes = {name: asdict(known.shape) for name, known in KNOWN_MODELS.items()}
    model, gpu, layout = START
    found = {
        "constants": {
            "BUCKET": BUCKET,
            "MASTER": MASTER,
            "MOMENT": MOMENT,
            "PARTS": PARTS,
            "AVERAGES": AVERAGES,
            "OPTIMIZER_BYTES": TRAINERS.optimizer_bytes,
        },
        "models": shapes,
        "kinds": {
            kind: {field: shapes[name][field] for field in KIND_FIELDS}
            for kind, name in KINDS.items()
        },
        "shape": asdict(OWN),
        "layout": asdict(ParallelLayout()),
        "gpus": {name: _gpu(chip) for name, chip in GPUS.items()},
        "choices": {
            **CHOICES,
            **KNOWN,
            **dict.fromkeys(FLAGS, (False, True)),
            "optimizer": tuple(AVERAGES),
        },
        "start": {"model": model, "gpu": gpu, "layout": asdict(layout)},
    }
    return json.dumps(found, separators=(",", ":"))


RULES = f"const GIVEN = {_given()};\n{_file('memory_rules.js')}{_file('memory_changes.js')}"


@cache
def memory_page() -> str:
    """Return the body of the page."""
    model, gpu, layout = START
    return f"""<nav><a href="index.html">All lessons</a></nav>
<style>{_file("memory_page.css")}</style>
<main class="fits">
<h1>{TITLE}</h1>
<p class="text">Training needs much more memory than the weights take: gradients, the optimizer's
state, and the activations that wait for the backward pass. Choose a model, GPUs and a layout, and
see what fills each GPU's memory at its peak.</p>
<noscript><p class="needs-kernel">Changing the settings needs JavaScript, which is switched off
here. The table is for {model} on {layout.gpus} {gpu} with dp {layout.dp}. Each GPU has
{decimal_bytes(CHIPS[gpu].hbm_bytes)}.</p></noscript>
<p id="verdict" role="status" hidden></p>
<div class="found" hidden>
<ul class="legend" aria-hidden="true">{_legend()}</ul>
<div class="bars"></div>
<p id="most" class="text" aria-live="polite"></p>
</div>
{_form()}
<p id="totals" hidden></p>
<section class="found" hidden><h2 id="changes-title">What would make it fit</h2>
<ol class="changes"></ol><p id="changes-note" class="text small"></p></section>
<section class="found"><h2>The peak of each part</h2>
<div class="scroll"><table class="stages"><thead><tr><td></td>{_head()}</tr></thead>
<tbody>{_rows()}</tbody></table></div>
<p class="text small">The parts have their peaks at different times, so they can add up to more than
the peak of all together. The last three are what else is alive at that peak. The gradient copy is
this trainer's own: it adds gradients up beside the arrays in which it sends them, and Megatron-LM,
for example, doesn't. Buffers are, for example, buckets of gradients on their way. The formulas are
those of <code>parallel101.cost.step_memory</code>, for optimizers with <code>fused=True</code>.
They count tensors. The CUDA context, NCCL's buffers and what the allocator loses to fragmentation
come on top, so leave some headroom.</p></section>
<section class="code found" aria-label="As Python" hidden><h2>As Python</h2>
<p class="text">The address of this page holds your settings, so a bookmark keeps them. This
program prints the same numbers. <code>parallel101 plan</code> searches for the fastest layout that
fits.</p>
<p><button id="copy-python">Copy as Python</button> <button id="copy-address">Copy the
address</button> <span id="copied" role="status"></span></p>
<pre class="python" tabindex="0" aria-label="The settings as Python"></pre></section>
</main>
<script>{RULES}{_file("memory_page.js")}{_file("memory_answer.js")}</script>"""


def _form() -> str:
    """The settings, with the words of each."""
    models = {name: name for name in KNOWN_MODELS}
    gpus = {name: f"{name}, {decimal_bytes(chip.hbm_bytes)}" for name, chip in GPUS.items()}
    precisions = {
        "bf16-mixed": "bf16, mixed",
        "fp16-mixed": "fp16, mixed",
        "bf16": "bf16 only",
        "fp32": "fp32 only",
    }
    optimizers = {"adamw": "AdamW", "momentum": "SGD, momentum", "sgd": "SGD"}
    zero = {
        "0": "0: nothing",
        "1": "1: optimizer state",
        "2": "2: and gradients",
        "3": "3: and weights",
    }
    schedules = dict(zip(CHOICES["schedule"], ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2")))
    return f"""<form class="settings" aria-label="Settings" hidden>
<fieldset><legend>Model</legend>
{_select("model", "model", {**models, "own": "your own numbers"})}
{_number("time", "tokens of a sample", most=2**24)}
{_select("attention", "attention", {"fused": "fused", "unfused": "unfused"})}
</fieldset>
<fieldset><legend>GPUs</legend>
{_select("gpu", "GPU", gpus)}
<div class="pair">{_number("dp", "data, dp")}{_number("tp", "tensor, tp")}</div>
<div class="pair">{_number("pp", "pipeline, pp")}{_number("cp", "context, cp")}</div>
{_number("ep", "experts, ep")}
</fieldset>
<fieldset><legend>Training</legend>
{_select("precision", "precision", precisions)}
{_select("optimizer", "optimizer", optimizers)}
<p id="optimizer-words"></p>
{_select("zero_stage", "ZeRO stage: dp shards", zero)}
{_select("recompute", "recomputation", {name: name for name in RECOMPUTE})}
{_check("sequence_parallel", "sequence parallel")}
</fieldset>
<fieldset><legend>Batch</legend>
<div class="pair">{_number("microbatch", "samples in a microbatch")}
{_number("microbatches", "microbatches a step")}</div>
{_select("schedule", "pipeline schedule", schedules)}
{_number("chunks", "stages on a rank", most=64)}
</fieldset>
<details id="numbers"><summary>The numbers of the model</summary><div>
{_select("kind", "kind of layers", {kind: kind for kind in KINDS})}
{_number("width", "width", most=10**6)}{_number("layers", "layers", most=1024)}
{_number("heads", "heads", most=4096)}
{_number("kv_heads", "key/value heads", empty="as many")}
{_number("feed_forward", "features inside an MLP", most=10**7, empty="4 × width")}
{_number("vocabulary", "vocabulary", most=10**7)}
{_number("experts", "experts in a layer", least=0)}{_number("top_k", "experts of a token")}
{_check("tied", "output layer tied to the embedding")}{_check("dropout", "dropout")}
</div></details>
<details><summary>More about the step</summary><div>
{_select("gradient_dtype", "gradients", {"": "as the weights", "fp32": "fp32"})}
{_check("overlap", "gradients are sent during backward")}
{_select("context", "attention along cp", {name: name for name in CHOICES["context"]})}
</div></details>
</form>"""


def _select(name: str, words: str, options: dict[str, str]) -> str:
    found = "".join(
        f'<option value="{escape(value)}">{escape(text)}</option>'
        for value, text in options.items()
    )
    return f'<label>{words} <select id="{name}">{found}</select></label>'


def _number(name: str, words: str, *, least: int = 1, most: int = 2**16, empty: str = "") -> str:
    """A field that may be empty if `empty` says what this means."""
    rest = f'placeholder="{empty}"' if empty else "required"
    return (
        f'<label>{words} <input id="{name}" type="number" inputmode="numeric" min="{least}" '
        f'max="{most}" step="1" {rest}></label>'
    )


def _check(name: str, words: str) -> str:
    return f'<label class="check"><input id="{name}" type="checkbox"> {words}</label>'


def _legend() -> str:
    return "".join(f'<li><i class="{kind}"></i>{words}</li>' for kind, words in PARTS.items())


def _head() -> str:
    names = [*PARTS.values(), "peak"]
    return "".join(f'<th class="number" scope="col">{name}</th>' for name in names)


def _rows() -> str:
    """The table for the settings with which the page opens, which have one stage."""
    model, _, layout = START
    (stage,) = step_memory(KNOWN_MODELS[model].shape, layout)
    cells = [decimal_bytes(getattr(stage, name)) for name in (*PARTS, "total")]
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row">every GPU</th>{numbers}</tr>'
