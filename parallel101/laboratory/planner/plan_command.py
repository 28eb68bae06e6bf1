"""`parallel101 plan`: lays out a model on a cluster, and says how long a step takes.

    parallel101 plan --model llama-3-70b --gpus 1024
    parallel101 plan --model 12288,96,96,51200,2048 --gpus 1024 --device A100 --attention unfused
    parallel101 plan --model config.json --gpus 64 --layout tp=8,recompute=full --top 3

Nothing heavy is imported before the arguments are parsed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kMG]i?|Ki|)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `parallel101 plan`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "FILE.json has the fields of ModelShape: width, layers, heads, vocabulary and time, and if "
        "they differ from\na GPT's: kv_heads, feed_forward, gated, norm (layer or rms), biases, "
        "positions (learned or rotary), tied,\nattention, experts, top_k, dropout and name. The "
        "config.json of a LLaMA on Hugging Face is read, too."
    )

    def add(name: str, metavar: str | None, words: str, **options: Any) -> None:
        default = options.get("default")
        words += f" (default: {default})" if default else ""
        parser.add_argument(f"--{name}", metavar=metavar, help=words, **options)

    known = "llama-3-8b, llama-3-70b, llama-3-405b, gpt3-175b, FILE.json, or h,L,a,V,s"
    add("model", "MODEL", f"{known} (width, layers, heads, vocabulary, time)", required=True)
    add("gpus", "N", "how many GPUs", required=True, type=int)
    add("device", "NAME", "A100, H100, H200 or B200", default="H100")
    words = "tokens of a step, e.g. 4194304 or 4Mi (default: the model's own, or 4Mi)"
    add("batch-tokens", "N", words, type=amount)
    add("time", "N", "tokens of a sample (default: the model's own)", type=amount)
    add("memory", "SIZE", "of a GPU, e.g. 72GB (default: the device's)", type=memory)
    add("nodes-of", "N", "GPUs of a node", type=int, default=8)
    words = "unfused keeps matrices of (time, time)"
    add("attention", None, words, choices=("fused", "unfused"), default="fused")
    words = "attention along cp: fused kernels, or HybridTrainer's own, plain products in 32 bits"
    add("ring", None, words, choices=("fused", "own"), default="fused")
    kinds = ("bf16-mixed", "bf16", "fp16-mixed", "fp32")
    add("precision", None, "as HybridTrainer's", choices=kinds, default="bf16-mixed")
    words = "what is fixed and not searched, e.g. tp=8,pp=4,microbatch=2,recompute=full: any of "
    words += "dp, tp, pp, cp, ep, microbatch, microbatches, chunks, schedule, zero_stage, "
    words += "recompute, sequence_parallel, gradient_dtype, overlap, context"
    add("layout", "KEY=VALUE,…", words, type=parse_layout, default={})
    words = "how many layouts are shown, the fastest of each mesh"
    add("top", "N", words, type=amount, default=10)
    words = "show several layouts of one mesh, too"
    parser.add_argument("--all", dest="every", action="store_true", help=words)
    words = "how many of them are then run on virtual GPUs"
    add("simulate", "N", words, type=amount, default=3)
    add("json", "FILE", "write everything to this file", type=file_to_write())
    words = "write a picture: .svg, .html, or with Chromium .png"
    add("picture", "FILE", words, type=file_to_write(".svg", ".html", ".png"))


def main(args: argparse.Namespace) -> int:
    """Print the quick model's plan, then what virtual GPUs say of it, and write the files.

    Returns 0, or 1 if no layout fits.

    Raises ValueError for arguments that can't be.
    """
    from parallel101.laboratory.planner.plan_report import quick_text, simulated_text
    from parallel101.laboratory.planner.search import NoLayoutError
    from parallel101.laboratory.planner.training_plan import plan

    options = {name: getattr(args, name) for name in signature(plan).parameters if name in args}
    try:
        found = plan(**options | {"simulate": 0})
    except NoLayoutError as error:
        print(f"parallel101 plan: {error}", file=sys.stderr)
        return 1
    print(quick_text(found), end="", flush=True)
    found = found.simulate(args.simulate)
    print(simulated_text(found), end="")
    files = {args.json: found.save, args.picture: lambda path: found.picture().save(path)}
    for path, write in files.items():
        if path:
            print(f"\nWrote {write(path)}.")
    return 0


def file_to_write(*kinds: str) -> Callable[[str], Path]:
    """Return the argparse type of a file that is written at the end, of one of these kinds.

    It is wrong at once if its folder does not exist, and not after all the work.
    """

    def path_of(text: str) -> Path:
        path = Path(text)
        if not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: the folder {path.parent} does not exist")
        if kinds and path.suffix not in kinds:
            raise argparse.ArgumentTypeError(
                f"{text}: expected a name that ends in {' or '.join(kinds)}"
            )
        return path

    return path_of


def parse_layout(text: str) -> dict[str, Any]:
    """Return "tp=8,recompute=full" as {"tp": 8, "recompute": "full"}. Keys are checked later."""
    found: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value or key in found:
            why = "given twice" if key in found else "not KEY=VALUE"
            raise argparse.ArgumentTypeError(
                f"{part!r} is {why}; expected e.g. tp=8,pp=4,recompute=full"
            )
        words = {"true": True, "True": True, "false": False, "False": False, "None": None}
        found[key] = int(value) if value.isdecimal() else words.get(value, value)
    return found


def amount(text: str) -> int:
    """Return a whole amount: "4Mi" → 4194304, "80G" → 80000000000.

    Raises ArgumentTypeError for anything else.
    """
    matched = AMOUNT.fullmatch(text.replace(",", "").replace("_", ""))
    value = float(matched[1]) * UNITS[matched[2]] if matched else None
    if value is None or value % 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not an amount; expected a whole number, with k, M, G, Ki, Mi or Gi if you "
            "like"
        )
    return int(value)


def memory(text: str) -> int:
    value = amount(text.removesuffix("B"))
    if value < 1e6:
        raise argparse.ArgumentTypeError(
            f"{text} is less than a megabyte; expected the memory of a GPU, e.g. 80GB"
        )
    return value
