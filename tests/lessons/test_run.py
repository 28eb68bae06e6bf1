"""Every lesson runs from top to bottom, shows the pictures it promises, and becomes a page that
plays offline.
"""

from __future__ import annotations

import os
import re

import pytest

from parallel101.laboratory.publish.execute import run_notebook
from parallel101.laboratory.publish.page import lesson_body
from tests.lessons.lesson import LESSONS, pictures, printed, read

NAMES = sorted(path.stem for path in LESSONS.glob("*.ipynb"))
DRAWING_CALL = re.compile(
    r"(\.(animate|timeline|picture|before_after)\(|[a-z]+_scene\(|sweep\(|^bandwidth\(|explore_collective\(|LiveLoss\()"
)  # in the last statement of a cell


def counted(steps: int, path: str, busiest: str) -> list[str]:
    """What `beside` prints if nobody has predicted anything."""
    rows = {"steps": str(steps), "bytes on the critical path": path, "busiest rank sends": busiest}
    return [rf"{what} +you: +\? +the run: +{value}\b" for what, value in rows.items()]


def last_column(steps: str, path: str, busiest: str) -> list[str]:
    """What the last column of `beside` shows."""
    rows = {"steps": steps, "bytes on the critical path": path, "busiest rank sends": busiest}
    return [rf"^{what} .* {value}$" for what, value in rows.items()]


SAME_MESSAGES = "the same messages as the package's"

ROUNDING = r"'(\d\.\de-1[5-7]|0\.0e\+00)'"  # of float64

TINY = r"(\d(\.\d)?e-1[3-9]|0(\.0)?e\+00)"

# what verify prints
EQUAL = (
    r"(^|: )equal to one process\nlargest differences .*\nloss .*%\n(.|\n)*gradient "
    r".*%\n(.|\n)*update.*"
)

# Output that the text around a cell describes. No cell asserts it: it would tell the answer before
# the run.
PRINTED = {
    "00_ranks": {
        "hello": [r"\[rank 0\] hello from rank 0 of 4", r"\[rank 3\] hello from rank 3 of 4"],
        "pids": [
            (
                r"\[(\d+), (?!\1\b)(\d+), (?!\1\b|\2\b)(\d+), (?!\1\b|\2\b|\3\b)(\d+)\]\nthis "
                r"notebook: (?!\1\b|\2\b|\3\b|\4\b)\d+"
            )
        ],
        "notes": [r"ranks' notes: +\[\[0\], \[1\], \[2\], \[3\]\]\nthe notebook's notes: \[\]"],
        "message-check": [
            r"you said: +\?",
            r"rank 0 sent: +32 bytes in 1 message",
            r"rank 1 received: +32 bytes",
        ],
        "waiting-check": [r"in recv for (0\.[1-9]|[1-9])\d* s, for 32 bytes"],
        "deadlock-run": [
            "rank 0 waits in send to rank 1",
            "rank 1 waits in send to rank 0",
            "cycle: rank 0 → rank 1 → rank 0",
            "irecv",
        ],
        "deadlock-eager": [r" 4 bytes: fine", r" 400 bytes: fine", r"40000 bytes: deadlock"],
        "isend-run": [r"^\[1\.0, 0\.0\]$"],
        "isend-changed": ["rank 0 changed a tensor that was still being sent"],
        "dies-run": [r"rank 2 raised ZeroDivisionError(.|\n)*in careless"],
        "dies-killed": ["rank 2 exited with code 7"],
        "sim-run": [r"the virtual clock: 64\.0 s(.|\n)*the token counted: 64 ranks"],
        "sim-gloo": [r"^\[4, 1, 2, 3\]$"],
        "nccl-run": [
            "rank 0's send to rank 1 waits in the queue behind its receive from rank 1",
            "cycle: rank 0 → rank 1 → rank 0",
        ],
        "nccl-batch": [r"^\[1\.0, 0\.0\]$"],
        "script-torchrun": [r"results: \[2, 1\]\nresults: \[2, 1\]"],
        "turns-check": [r"not swapped yet: \[-1\.0, -1\.0\]"],
        "exercise-1": [r"swap_in_turn: 0 steps\nswap: 1 steps"],
    },
    "01_collectives": {
        "flat-count": [*last_column("7", "28,672", "28,672"), SAME_MESSAGES],
        "tree-count": [*last_column("3", "12,288", "12,288"), SAME_MESSAGES],
        "scatter-count": [*last_column("7", "3,584", "3,584"), SAME_MESSAGES],
        "gather-count": [*last_column("7", "3,584", "512"), SAME_MESSAGES],
        "reduce-count": [*last_column("3", "12,288", "4,096"), SAME_MESSAGES],
        "all-gather-count": [*last_column("7", "3,584", "3,584"), SAME_MESSAGES],
        "reduce-scatter-count": [*last_column("7", "3,584", "3,584"), SAME_MESSAGES],
        "naive-count": [*last_column("6", "24,576", "12,288"), SAME_MESSAGES],
        "ring-count": [*last_column("14", "7,168", "7,168"), SAME_MESSAGES],
        "all-to-all-count": [*last_column("7", "3,584", "3,584"), SAME_MESSAGES],
        "barrier-count": [*last_column("3", "3", "3"), SAME_MESSAGES],
        "tree-scale": [
            r" 64 ranks: +63 steps flat, 6 in a tree\n +256 ranks: +255 steps flat, 8 in a tree"
        ],
        "root-check": ["not right yet"],
        "data-parallel-run": [r"rank 3 differs by \d\.\de-1[67]|rank 3 differs by 0\.0e\+00"],
        "ring-scale": [
            r"^ 2 ranks: 1\.00 n in the ring, 2 n in two trees",
            r"^64 ranks: 1\.97 n in the ring, 12 n in two trees",
        ],
        "torch-run": [r"^\[(\[True, True, True\](, )?){4}\]$"],
        "bug-numbers": [r"not right yet: \[4\.0, 4\.0, 10\.0, 10\.0, "],
    },
    "02_algorithms_and_cost": {
        "problem-run": [
            r"flat 0\.28 ms  tree 0\.12 ms  ring 0\.28 ms",
            r"flat 47\.26 ms  tree 20\.25 ms  ring 6\.15 ms",
        ],
        "doubling-count": [*counted(3, "12,288", "12,288"), "the same messages as the package's"],
        "crossing": ["they cross at 220 kB", "α / β is 25 kB"],
        "chain-check": ["right values, 7.00 n on the critical path of 8 ranks"],
        "chain-run": [
            "the formula: 32 segments",
            "the best chain: 4.74 ms",
            r"tree: 10.13 ms\nscatter \+ all-gather: 6.07 ms\nn · β: 3.36 ms",
        ],
        "fit-run": [
            r"fit: α = \d+ µs, [\d.]+ GB/s",
            r"4,194,304 bytes: +\d+ µs \(\d+ to \d+\), \d+\.\d\d × the line",
        ],
        "bus-run": [
            r"all_reduce +50\.0 +33\.3 +28\.6 +50\.0 +50\.0 +50\.0",
            r"all_to_all +100\.0 +66\.7 +57\.1 +50\.0 +50\.0 +50\.0",
        ],
        "levels-run": [
            rf"{cards}  {way} +you: \? +the run: {took} s; GPUs 0–7 send n × {sent}\n"
            for cards, way, took, sent in (
                ("1 × 400 GB/s", "ring", r"0\.66", "(0 ){7}1.88"),
                ("1 × 400 GB/s", "hierarchical", r"0\.89", "(0.125 ?){8}"),
                ("8 ×  50 GB/s", "ring", r"5\.25", "(0 ){7}1.88"),
                ("8 ×  50 GB/s", "hierarchical", r"0\.89", "(0.125 ?){8}"),
            )
        ],
        "nccl-run": [
            "1 KiB .* tree LL; .* tree LL\n",
            "4 MiB .* tree LL128;",
            "4 GiB .* ring Simple; on 128 nodes: tree Simple",
        ],
        "auto-rule": [
            "algorithm='recursive_doubling'",
            "algorithm='reduce_broadcast', max_ranks=8",
            "algorithms: .*ring",
        ],
    },
    "03_adjoints": {
        "problem-run": ["element 0 of tensors does not require grad and does not have a grad_fn"],
        "own-run": [r"one process: 7e-01"],
        "one-alone": [r"in one process: 12\.0"],
        "one-run": [r"gradient of x: 12\.0"],
        "backward-bytes": [r"forward:  \[48, 48, 48, 48\]\n.*backward: \[48, 48, 48, 48\]"],
        "function-run": [r"by hand .* (\de-1[67]|0e\+00)\np101.all_gather .* (\de-1[67]|0e\+00)"],
        "function-source": ["return reduce_scatter"],
        "test-run": [r"all ranks: .* difference -?(\de-1[56]|0e\+00)"],
        "test-all-run": [r"(\w+ +-?[\d.]+ +-?[\d.]+   equal\n?){8}"],
        "learn-test": [
            (
                r"right .* equal .* ratio 1\.000\nown part only .* different .*\nn times too large "
                r".* ratio 4\.000"
            )
        ],
        "centre-check": [r"different +ratio 0\.\d+$"],
        "loss-run": [r"measured: 4\.000"],
        "loss-once": [r"factor: 1\.000\nall_reduce +480 bytes .*\nreduce_from_group +240 bytes "],
        "pair-run": [r"clone .* \de[-+]0\d\ncopy_to_group .* (\de-1[567]|0e\+00)"],
        "products-run": [
            (
                r" multiply: 0 .*\n.* AllGather_X, then multiply: 576 .*\n.* multiply, then "
                r"AllReduce_X: 768 .*\n.* AllGather_X, "
            )
        ],
        "training-run": [
            r"samples cut +nothing +AllReduce W +nothing\nweights cut too +AllGather W "
            r"+ReduceScatter W +AllGather W\n"
            r"outputs cut +nothing +nothing +AllReduce X\ninputs cut +AllReduce Y +nothing +nothing"
        ],
        "break-place-run": [
            r"clone +\[1\.0, 2\.0, 3\.0, 4\.0\]\nexp +\[4\.0, 8\.0, 12\.0, 16\.0\]"
        ],
        "break-everything-run": [
            r"broadcast .* different\nall_reduce .* equal\nall_to_all .* different"
        ],
        "break-slice-run": [
            r"slice: .* equal\nring_all_gather_backward +3,000 .*\nall_reduce_then_slice +6,000 "
        ],
        "break-absent-run": [
            r"rank 0 waits in recv from rank 3 \(returned\), .* weights\.sum\(\)\.backward\(\)"
        ],
    },
    "04_data_parallel": {
        "alone-run": [r"<History: 20 steps, loss [45]\.\d+ → [23]\."],
        "alone-years": [r"tokens per second, so [\d.,]+ years"],
        "by-hand-run": [rf"{n} ranks: \[({ROUNDING}(, )?){{{n}}}\]" for n in (2, 3, 4)],
        "price-run": [r"sent: +\[9640, 9680, 9680, 9640\] by rank; S is 1288"],
        "lanes-sim": [r"'naive': '17.8 s', 'bucketed': '17.0 s', 'overlapped': '14.0 s'"],
        "real-check": [r"(rank \d: the first bucket was sent [1-9]\d* ms before .*\n?){2}"],
        "real-spread": [r"(\w+ +median +\d+ ms, from \d+ to \d+ ms\n?){3}"],
        "train-check": [EQUAL, r"(a step on \d ranks? +median +\d+ ms, from \d+ to \d+ ms\n?){2}"],
        "scaling-run": [
            r"strong: you said \?, measured (9\.[5-9]|10\.[0-4]) times as many\n"
            r"weak: you said \?, measured 2[56]\.\d times as many"
        ],
        "scaling-cores": [
            r"\d+ cores\n(ranks: \d +\d+\.\d times as fast +\d+ to \d+ ms a step\n?){3}"
        ],
        "accumulate-run": [r"'accumulate=1': (\d+), 'accumulate=4': \1\}"],
        "break-sum-run": [r"\[('[1-9]\.\de\+0\d'(, )?){4}\]"],
        "break-adamw-run": [
            r"always four times too long: \de-(0[6-9]|1\d) .*\nfrom step 25 on: +\de-0[12]"
        ],
        "break-start-run": [r"ranks: ([1-9]|0\.[1-9])"],
        "break-start-error": ["layers.0.weight", "rank 1", "sync=True"],
        "break-uneven-run": [r"\[('\d\.\de-0[1-3]'(, )?){4}\]"],
        "break-uneven-check": [
            r"10 samples: not right yet, \d\.\de-0[1-3] .*\n12 samples: right, "
        ],
        "break-labels-run": [
            r"^this layout does not (.|\n)*Return \(sum of losses, their weight\)(.|\n)*^loss: \d"
        ],
        "break-every-run": [r"\[1288, 3864\]"],
    },
    "05_sharding": {
        "pain-run": [r"measured: 16\.00 bytes per parameter, with 1,052,672 parameters"],
        "by-hand-run": [
            r"blocks: \[41, 40, 40, 40\]",
            *(rf"{n} ranks: \[('(\d\.\de-1[2-7]|0\.0e\+00)'(, )?){{{n}}}\]" for n in (2, 3, 4)),
        ],
        "stages-run": [
            r"stage 1 .* 10\.\d\d bytes",
            r"stage 2 .* 7\.\d\d bytes",
            r"stage 3 .* 4\.\d\d bytes",
        ],
        "stages-check": [
            (
                r"weights .*: 1\.00 1\.00 0\.25\ngradients .*: 1\.00 0\.25 0\.25\noptimizer state "
                r".*: 0\.25 0\.25 0\.25"
            ),
            r"gathered at once, at most: 2\.0 layers",
        ],
        "price-check": [r"data parallel .*the run: 2\.00\n1 .*2\.00\n2 .*2\.00\n3 .*3\.00"],
        "save-run": ["resumed at step 15"],
        "save-check": [r"30 steps; .*: True\n.*: (\de-0[4-9]|0e\+00) of the loss"],
        "design-run": [
            rf"nothing +{TINY} from .*\nwrong: C +\de-02 .*\nwrong: D +\de-02 .*\nwrong: E +\de-01 "
        ],
        "design-same": [
            rf"nothing +{TINY} from .*\nwrong: C +{TINY} .*\nwrong: D +{TINY} .*\nwrong: E +\de-01 "
        ],
        "break-clip-run": [r"by_local_norm: \d\.\de-0[12]"],
        "break-clip-check": [r"not right yet: \d\.\de-0[12]"],
        "break-leak-run": [r"gathered at once, at most: 34 layers"],
        "break-all-reduce-run": [r"the same blocks: True\n.*\[6000, 3000\]"],
        "break-optimizer-run": [
            "the update of '.*' differs by (.|\\n)*looks at whole matrices",
            "DataParallelTrainer",
        ],
    },
    "06_tensor_parallel": {
        "pain-run": [r"measured: 1\.00"],
        "ways-run": [
            rf"{name} .* sent: \[({sent}(, )?){{4}}\]   {TINY} from"
            for name, sent in (("by_columns", 6144), ("by_rows", 12288))
        ],
        "lecture-run": [rf"2 ranks: {TINY} .*\n4 ranks: {TINY} "],
        "pair-check": [r"Y on each rank:( +not right yet){4}"],
        "pair-run": [r"measured: 2\.5$"],
        "between-run": [
            (
                rf"gelu .* {TINY} .*\nrelu .* {TINY} .*\nsoftmax .* \de-0\d .*\nlayer_norm .* "
                r"\de[-+]0\d "
            )
        ],
        "backward-nothing": [
            (
                rf"nothing   {{'dW': '{TINY}', 'dV': '{TINY}', 'dX': '\de(\+00|-0\d)'}}\nsummed: "
                r"\[\]   "
            )
        ],
        "backward-sum": [
            rf"({n} ranks: {{'dW': '{TINY}', 'dV': '{TINY}', 'dX': '{TINY}'}}\n?)"
            for n in (2, 3, 4)
        ],
        "mirror-code": [
            rf"\[12288, 12288, 12288, 12288\]\n.*'dW': '{TINY}', 'dV': '{TINY}', 'dX': '{TINY}'"
        ],
        "overlap-run": [r"{'wait at once': 2\.8, 'overlapped': 2\.0}"],
        "forward-run": [r"{'pieces = 1': 3\.6, 'pieces = 4': 2\.4}"],
        "attention-run": [
            rf"shared=False: 3 in .* {TINY} from(.|\n)*shared=True: 1 in .* {TINY} from"
        ],
        "vocabulary-check": [
            r"'whole_loss': 6291456, 'cut_loss': 9216",
            "measured: 683",
            "rows are right: True",
        ],
        "sequence-check": [
            (
                r"all-reduce +sent: (\d+) bytes +between the pairs: 16384 bytes\ncut along time "
                r"+sent: \1 bytes +between the pairs: 4096 bytes"
            ),
            rf"gradients: {TINY} apart",
        ],
        "plan-run": [
            r"attention.query \(2 modules\): column\(heads=4\)",
            r"mlp.down \(2 modules\): row",
            "head: vocabulary",
        ],
        "memory-run": ["the same bytes with one sample: True"],
        "cost-check": ["counted: 393,216 bytes"],
        "cost-theory": [
            (
                r"tensor parallel: 393,216 .*: 393,216\ndata parallel: 299,520 .*: 299,520\nratio: "
                r"1\.31"
            )
        ],
        "break-bias-run": [rf"True +3\.0e\+00 .*\n.*False +{TINY} "],
        "break-dx-check": [
            r"(first pair, .: [1-9]e-01 .*\n){2}",
            rf"(second pair, .: {TINY} .*\n){{2}}",
            r"with the all-reduce of dX: loss ([\d.]+) → [\d.]+\nwithout .* loss \1 → (?!\1)",
        ],
        "exercise-1-check": ["dW: not right yet\ndX: not right yet not right yet "],
    },
    "07_pipeline": {
        "one-batch-run": [r"rank 0 works 24 s of 96 s: 25 %"],
        "gpipe-check": [rf"P = {n}: {TINY} from one process" for n in (1, 2, 4)],
        "bubble-run": [r"m = 2 .*60 s\nm = 4 .*42 s\nm = 8 .*33 s"],
        "bubble-check": [
            r"(m = \d: formula (\d+) s, run \2 s, .*\n?){4}",
            "m = 8: .* 27% of the step, 38% of the ideal time",
        ],
        "order-check": [r"not right yet: 15 s, activations held: \[4, 4\]"],
        "loop-run": [
            rf"GPipe +held: \(8, 8, 8, 8\) .* {TINY}",
            rf"1F1B +held: \(4, 3, 2, 1\) .* {TINY}",
        ],
        "loop-time": [r"33\.0 \[4, 3, 2, 1\] 27\.3%"],
        "interleaved-check": [r"9\.0 and 4\.5 s", r"48 and 112", r"4 and 11 half as large"],
        "split-run": [rf"(zb-h\d: {TINY} from one process\n?){{2}}"],
        "split-check": [r"'1F1B': '9 s', 'ZB-H1': '3 s', 'ZB-H2': '0 s'}"],
        "published-run": [r"ours: 0\.2431(.|\n)*ours: 0\.1585(.|\n)*ours: 0\.1083"],
        "trainer-run": [rf"(\S+ +largest difference: {TINY}\n?){{5}}", EQUAL],
        "tied-run": [r"embedding\.token\.weight: on stages 0, 1"],
        "tied-check": [
            (
                rf"(gradient of the tied .*: {TINY} from .*\n){{2}}(update of the tied .*: {TINY} "
                rf"from .*\n?){{2}}"
            )
        ],
        "break-send-run": [
            rf"GPipe: finishes, {TINY} from",
            r"1F1B: deadlock",
            "All of them send first",
        ],
        "break-loss-show": [
            r"right +1\.00 times as long, cosine 1\.000",
            r"not divided +8\.00 times as long, cosine 1\.000",
            r"zero_grad before each .*cosine -0\.",
        ],
        "hang-ours": [
            rf"GPipe: finishes, {TINY} from",
            "rank 2's receive from rank 3 waits in the queue behind its send to rank 3",
        ],
        "hang-two-groups": [rf"direction: {TINY} from"],
    },
    "09_memory": {
        "problem-run": [
            r"model states .* 112\.0 GB\nactivations .* 51\.5 GB\ntogether 164 GB",
        ],
        "bits-run": [r"bfloat16: .* 1\.0000\n.*float32: .* 2\.0000"],
        "states-run": [
            r"^fp32 .* 16\.00 bytes",
            r"^bf16-mixed  .* 16\.00 bytes",
            r"^bf16-mixed, fp32 gradients .* 18\.00 bytes",
            r"^bf16  .* 8\.00 bytes",
        ],
        "count-run": [r"counted: 20480\n10,240 bytes.*\n10,240 bytes"],
        "step-modules": ["2.98 MB of activations at the peak, in forward of microbatch 0"],
        "formula-run": [
            "counted: 661,504   formula: 655,360 bytes\nthe formula misses 0.93 %",
            r"= 6144\.0",  # the difference, to the byte
        ],
        "surprise-run": [r"unfused +× 2\.41 × 2\.68\nfused +× 2\.00 × 2\.00"],
        "logits-run": [r"1024 .* 2,121,728 .* 1,117,700\n.* 2,121,728 .* 4,263,428"],
        "logits-pieces": [
            r"^loss (\d+\.\d{4}): 21,\d{3},\d{3} bytes\nloss \1: 4,\d{3},\d{3} bytes"
        ],
        "recompute-check": ["not right yet"],
        "price-run": [r"none +34\.7 MB(.|\n)*selective +18\.9 MB(.|\n)*full +9\.2 MB"],
        "random-run": [r"=False: off by \d\d+%.*\n.*=True: off by 0%"],
        "sums-bytes": [r"bfloat16: each rank sends 0\.79 MB.*\n.*float32: .* 1\.58 MB"],
        "pipeline-run": [
            r"none +rank 0: 5\.29 MB +rank 1: 3\.97 MB +rank 2: 2\.65 MB +rank 3: 1\.52 MB",
            r"full +rank 0: 0\.89 MB",
        ],
        "sums-run": [
            r"bfloat16 +2 ranks: 2\.4e-03(.*)32 ranks: 7\.1e-03",
            "thousand ones in bfloat16: 256$",
        ],
        "fp8-run": [
            r"gradient +one scale 2\.6%, MXFP8 2\.6%, NVFP4 9\.[3-5]%",
            r"outlier +one scale [89]\.\d%, MXFP8 2\.6%, NVFP4 9\.\d%",
        ],
        "fp8-sum-run": [
            r" 2 ranks: packed by every rank 1\.[78]%, packed once 2\.[45]%",
            r"16 ranks: packed by every rank [56]\.\d%, packed once 1\.[456]%",
            r"packed_once: 224,730 bytes, in bfloat16 435,840\ngathered: 224,730 ",
        ],
        "breaks-fp16": [r"0\.0\]\n\[.*, 9\.9\d+e-09\]"],
        "breaks-norm-run": ["'blocks.0.1' is a BatchNorm1d", "running statistics"],
    },
    "10_sequences_and_experts": {
        "problem-run": [r"scores of one head .* 32 GiB\ninput of one layer .* 4 GiB"],
        "merge-run": [r"the mean is off by 26%"],
        "merge-check": ["not right yet"],
        "ring-run": [rf"sent: 3 messages, 3,072 bytes\noff by {TINY}"],
        "triangle-run": [r"busy: 53\.5%\n1\.93 s;  without a mask 2\.05 s"],
        "zigzag-run": [r"busy: 100\.0%   1\.03 s"],
        "ulysses-run": [
            r"16 key and value heads: ring 12,288 bytes, Ulysses 6,144",
            r" 4 key and value heads: ring 3,072 bytes, Ulysses 3,840",
        ],
        "cp-step": [EQUAL],
        "cp-bytes": [r"the run: 8\.00 A\n.*'dp_cp': \d+, 'cp': 262144"],
        "experts-run": [r"46\.7 billion\nused by a token .* 12\.9 billion"],
        "dispatch-check": [r"not right yet: off by \d\d+%"],
        "hot-run": [r"tokens of each expert: \[24, 146, 71, 15\]   146 ms"],
        "balance-code": [r"equally: 1   one expert: 4"],
        "balance-train": [
            r"step   0: 1\.40(.|\n)*step 200: 1\.0[12]",
            r"tokens of each expert: \[[567]\d(, [567]\d){3}\]   7\d ms",
        ],
        "ep-program": [EQUAL],
        "ep-bytes": [r"the run: (3\.9|4\.0)\d A\n.*'dp': \d+, 'dp_ep': \d+, 'ep': \d+"],
        "breaks-mask-run": [r"rank 0: off by 0%\nrank 1: off by \d\d+%"],
        "breaks-mix-run": [r"^this layout does not compute what one process does", "Along cp"],
    },
    "08_three_axes": {
        "pain-run": [r" 2 +16\.0 +3\d +11%\n +4 +16\.0 +10\d +27%\n +8 +16\.0 +25\d +47%"],
        "mesh-run": [r"rank 5 = dp 1, pp 0, tp 1: +dp \[1, 5\] +pp \[5, 7\] +tp \[4, 5\]"],
        "file-held": [r"1\.qkv\.weight 48 32 cut\n(.|\n)*1\.out\.bias 32 $"],
        "file-run": [
            rf"(step \d: loss \d\.\d+, apart by {TINY}; norm \d\.\d+, apart by {TINY}\n?){{3}}"
        ],
        "trainer-run": [EQUAL, rf"^norm +{TINY} +{TINY} "],
        "describe-run": [
            "embedding.token.weight: on stages 0, 1 over pp and sharded along dim 0 over tp",
            "7 tensors of the model: on stage 0 over pp\n",
        ],
        "bytes-theory": [
            (
                r"dp  theory: ([\d,]+)   the run: \1\npp  theory: ([\d,]+)   the run: \2\ntp  "
                r"theory: ([\d,]+)   the run: \3$"
            )
        ],
        "tp-check": [r"tp 2 .* right: True\ntp 4 .* right: False"],
        "zero-run": [
            r"counted: 4\.0\d bytes",
            r"ZeRO-1 .* 3\.0\d bytes",
            r"ZeRO-3 .* 2\.0\d bytes",
        ],
        "links-run": [
            r" 14\.9 s\n.* 18\.1 s\n.* 38\.4 s",
            r"bytes sent by all ranks together: \d+$",
        ],
        "train-check": [r"ln V = 4\.\d\d; first step 4\.\d\d\nlast ten steps: (1\.|2\.[0-7])"],
        "write-run": [r"BEFORE: The (.|\n)*AFTER: The "],
        "published-numbers": [
            r"ZeRO-3 alone: 384 GPUs 82 s, 768 GPUs 67 s, 1536 GPUs 67 s",
            r"96: 384 GPUs 77 s, 768 GPUs 39 s, 1536 GPUs 21 s\n.*speed: 5 s",
        ],
        "runs-data": [r"= 1,536 GPUs\n.* = 3,072 GPUs\n.* = 16,384 GPUs"],
        "runs-run": [
            r"GPT-3 +1\.8 +1046\.9 +0\.0 +0\.0 +0\.0%",
            r"GPT 1T +31\.5 +6\.6 +13\.4 +1127\.4 +11\.0%",
            r"Llama 3 +6\.7 +18\.8 +1\.1 +236\.8 +48\.4%",
        ],
        "interleaved-run": [r"from the bubble: 407   published: 400"],
        "domain-run": [
            r"a step: 6\.2 s",
            r"tp: 0\.53 s on NVLink, 4\.74 s between nodes",
            r"H100: NVLink connects 8 GPUs\nGB200: NVLink connects 72 GPUs",
        ],
        "break-share-run": [r"step 2: loss 4\.\d+, apart by \de-0[12]; norm"],
        "break-order-run": ["src=0 is this rank's own position"],
    },
    "11_a_thousand_gpus": {
        "problem-run": [
            r"a step .*computed: 1\.75 s\n.*computed: 73 days\n.*on 1,024 GPUs: 260 days"
        ],
        "roofline-run": ["computed: 310 tokens"],
        "layer-run": [
            "NVLink .*computed: 17.8 ranks",
            r"tp  8: messages take  39% of the arithmetic\n(.*\n)*network card .*: 2.0 ranks",
            "tp  4: messages take 152% of the arithmetic",
        ],
        "tokens-run": [r" 1024 GPUs .* 4096 tokens .* 2475 needed\n 16384 GPUs .* 256 tokens"],
        "mfu-run": ["HFU 47.4%, MFU 35.6%"],
        "llama-mfu-run": ["computed: 32%"],
        "virtual-run": ["tensors are on meta"],
        "virtual-gpus": [r"rank 0: 92 TFLOP .* 13\.\d GB .*\nrank 4: 143 TFLOP"],
        "layout-run": [
            r"5\.[45]\d s, MFU 3[67]%, 6[12] GB on the first stage, 2[78] GB on the last",
            r"matmul 3\.0\d memory-bound 0\.[45]\d tp 0\.8\d .* bubble 0\.8\d",
        ],
        "layout-simulate": [r"virtual GPUs: 5\.\d\d s, [+-]0\.\d%"],
        "planner-best": [
            r"^4\.7\d s, MFU 4[123]%(.|\n)*matmul 3\.5\d memory-bound 0\.[56]\d tp 0\.4\d",
            r"\(256, 4\),\n.*\(\"dp\", \"tp\"\)(.|\n)*zero_stage=3,\n.*recompute=\"full\"",
            r"^0\.[78]\d s less: 3[123] days",
        ],
        "domain-run": [r"8 GPUs: 0\.9 ms, 16 GPUs: [56]\.\d ms"],
        "published-run": [r"(.*: [+-]0\.\d%\n?){3}"],
        "llama-run": [
            r" 8192 GPUs .* 430;  sums hidden: \d+, \+12%; .*, -10%\n"
            r" 16384 GPUs .* 400;  sums hidden: \d+, \+11%; .*, -26%"
        ],
        "breaks-run": [
            "a single node: .* would do is 32$",
            "a round number: ",
            "tp over two nodes: .*heads",
        ],
    },
    "12_keep_it_running": {
        "problem-run": [r"8 GPUs .* 6\d\d\d\.\d h.*\n.* 49\.5 hours\n.* 3\.1 hours"],
        "stragglers-run": ["computed: 24% longer"],
        "stragglers-many-run": [
            r"8 GPUs .* 0\.1% of the steps\n.*1024 GPUs .* 9\.7% .*\n.*16384 GPUs .* 80\.6%"
        ],
        "saving-check": ["not right yet"],
        "saving-run": [
            r" 1024 GPUs, 148\.8 s: every 121 minutes, 4\.1% lost",
            r" 1024 GPUs,   6\.3 s: every  25 minutes, 0\.8% lost",
            r"16384 GPUs, 148\.8 s: every  30 minutes, 16\.3% lost",
            r"16384 GPUs,   6\.3 s: every   6 minutes, 3\.4% lost",
        ],
        "background-run": [r"988 GB in all, 0\.97 GB .*\ncopy 15 ms, write 494 ms"],
        "background-check": [r"not right yet: {'first': \[5\.0\], 'second': \[6\.0\]}"],
        "background-measure": [r"stops for \d+ ms, or for \d+ ms"],
        "notice-run": ["rank 2 exited with code 7", r"noticed after \d\.\d s", r"5\.4% of 54 days"],
        "spares-run": [r" 0\.5 nodes in repair, 3 spares\n.* 7\.8 .*, 15 spares"],
        "replicas-run": [
            r"False +\[('\de-02', ){2}'\de-01', '\de-02'\]  12\.\d s",
            rf"True +\[('{TINY}'(, )?){{4}}\]  12\.\d s",
        ],
        "together-run": [r"70\.2%\n.* 83\.2%\n.* 88\.3%\n.* 95\.8%$"],
    },
}
IN_PICTURES = {  # text in a picture
    "00_ranks": {
        "message-picture": ["Messages between two ranks", "The longest wait: rank "],
        "deadlock-picture": ["Deadlock: who waits for whom"],
        "nccl-picture": ["Deadlock: who waits for whom"],
    },
    "01_collectives": {
        "flat-broadcast-watch": ["Flat broadcast"],
        "tree-watch": ["Tree broadcast"],
        "scatter-run": ["Flat scatter"],
        "scatter-table": ["The row of rank 0 has become a column."],
        "all-to-all-table": ["the matrix of blocks is transposed"],
        "gather-run": ["Flat gather"],
        "reduce-watch": ["Tree reduce"],
        "all-gather-watch": ["Ring all-gather"],
        "reduce-scatter-run": ["Ring reduce-scatter"],
        "hot-root": ["Tree all-reduce"],
        "ring-all-reduce-run": ["Ring all-reduce"],
        "bug-run": [
            "Step 3 of 6",
            "On rank 0, chunk d now contains rank 0's data more than once",
            "On rank 1, chunk a has rank 1's data twice",
        ],
        "all-to-all-run": ["all-to-all"],
        "barrier-watch": ["Step 3 of 3", "Each rank sends 1 B to another rank"],
        "explorer-run": ["Ring all-reduce"],
    },
    "02_algorithms_and_cost": {
        "doubling-watch": ["Recursive-doubling all-reduce"],
        "regimes-run": ["α = 20 µs, 1.25 GB/s"],
        "chain-picture": ["Timeline", "On the critical path: 11 messages"],
        "chain-plot": ["Broadcast of 4 MiB on 8 virtual ranks"],
        "node-picture": ["450 GB/s per GPU", "64 GB/s. Each card", "rail: 50 GB/s"],
        "fit-picture": ["A message between two processes"],
        "explorer-run": ["Recursive-doubling all-reduce"],
        "nccl-picture": ["model of an all-reduce on 4 nodes"],
    },
    "03_adjoints": {
        "gather-watch": ["Ring all-gather"],
        "backward-watch": [
            "Forward: ring all-gather",
            "Backward: ring reduce-scatter",
            "Backward, step 1 of 3: Each rank sends a chunk to its left",
        ],
        "learn-run": [
            "right: 15.6 to 0.968; own part only: 15.6 to 1.06; n times too large: 15.6 to 0.968"
        ],
        "case-two": ["AllGather_X, A[I, J]: rank 0 abcd"],
        "case-three": [
            "C[I, K] {U_X}: rank 0 a (terms [1, 0, 0, 0])",
            "AllReduce_X, C[I, K]: rank 0 a, rank 1 a",
        ],
        "case-four": [
            "AllGather_X, B[J, K]: rank 0 abcd",
            "multiply, C[I_X, K]: rank 0 a, rank 1 b",
        ],
    },
    "04_data_parallel": {
        "lanes-sim": ["naive: 17.8 s", "bucketed: 17.0 s", "overlapped: "],
        "real-lanes": ["naive: ", "bucketed: ", "overlapped: "],
        "train-run": ["1 rank: 5.", "2 ranks: 5."],
        "scaling-run": ["Samples per minute"],
        "accumulate-run": ["accumulate=1: 14.0 s", "accumulate=4: 15.5 s"],
    },
    "05_sharding": {
        "stages-run": ["Memory per rank"],
        "lanes-sim": ["on demand: 32.4 s", "prefetched: 20.4 s"],
        "save-run": ["never stopped: 4.", "2 ranks, then 1: 4."],
    },
    "06_tensor_parallel": {
        "ways-picture": ["AllGather_R, Y[B, F]: rank 0 ab"],
        "overlap-run": ["wait at once: 2.80 s", "overlapped: 2 s"],
        "forward-run": ["pieces = 1: 3.60 s", "pieces = 4: 2.40 s"],
        "plan-picture": [
            "query.weight: 64 × 64, columns cut into 4 × 16 (column)",
            "down.weight: 256 × 64, rows cut into 4 × 64 (row)",
        ],
        "memory-run": ["Memory per rank"],
    },
    "07_pipeline": {
        "one-batch-run": ["makespan 96 s · bubble rate 75.0 %"],
        "bubble-run": ["makespan 60 s", "makespan 42 s", "makespan 33 s · bubble rate 27.3 %"],
        "order-check": ["Your order", "makespan 15"],
        "loop-run": ["GPipe", "1F1B", "makespan 33 s", "bubble rate 27.3 %"],
        "interleaved-run": ["makespan 33 · ", "makespan 28.5 · bubble rate 15.8 %"],
        "split-run": ["ZB-H1", "bubble rate 11.1 %", "ZB-H2", "bubble rate 0.0 %"],
        "break-send-picture": ["Deadlock: who waits for whom"],
    },
    "08_three_axes": {
        "picture-run": [
            "Which axis communicates when",
            "dp: bytes and messages sent",
            "pp: bytes and messages sent",
            "tp: bytes and messages sent",
        ],
        "zero-run": ["Memory per rank"],
        "published-run": ["A step of GPT-3"],
        "train-run": ["8 ranks: 4."],
    },
    "09_memory": {
        "states-run": ["Memory per rank"],
        "step-run": ["One step of a GPT, two microbatches"],
        "surprise-picture": ["Activations of one block"],
        "price-run": ["One step: time against memory"],
        "pipeline-run": ["1F1B on four ranks, eight microbatches"],
        "sums-picture": ["The error of a ring"],
    },
    "10_sequences_and_experts": {
        "ring-watch": ["Keys and values go round", "all-gather"],
        "triangle-run": ["Causal ring attention, contiguous"],
        "zigzag-run": ["Causal ring attention, zigzag"],
        "hot-run": ["Dispatch with an untrained router"],
        "balance-train": ["Dispatch with a balanced router"],
    },
    "11_a_thousand_gpus": {
        "roofline-picture": ["TFLOP/s of a product on an H100"],
        "virtual-run": ["Four blocks of a 70B model, on virtual H100s"],
        "planner-run": ["llama-3-70b on 1,024 H100s"],
        "domain-run": ["An all-reduce of activations"],
    },
    "12_keep_it_running": {
        "replicas-run": ["Replica 2 misses four steps"],
        "stragglers-run": ["all equally fast", "a slow GPU in stage 2", "makespan 70.5"],
        "saving-picture": ["Percent of the time lost"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_shows_what_its_text_says(name):
    before = os.times()
    notebook = run_notebook(LESSONS / f"{name}.ipynb", timeout=150)
    after = os.times()
    busy = sum(after[2:4]) - sum(before[2:4])  # of the kernel and its ranks
    assert busy < 60, "a lesson takes 30 s on two cores, which is 60 s of work, or less"
    cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    for cell in cells.values():
        if DRAWING_CALL.search(cell.source.rpartition("\n\n")[2]):
            assert len(pictures(cell)) == 1, cell.id
    for cell_id, patterns in PRINTED.get(name, {}).items():
        for pattern in patterns:
            assert re.search(pattern, printed(cells[cell_id]), re.MULTILINE), (
                cell_id,
                pattern,
                printed(cells[cell_id]),
            )
    for cell_id, texts in IN_PICTURES.get(name, {}).items():
        for text in texts:
            assert text in pictures(cells[cell_id])[0], (cell_id, text)
    page = lesson_body(notebook, LESSONS)  # raises an error if something must be fetched
    assert page.count("<figure") == sum(len(pictures(cell)) for cell in cells.values())
    assert page.count("needs-kernel") == sum(
        bool(re.search(r"^(p101\.)?explore_collective", cell.source, re.MULTILINE))
        for cell in cells.values()
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_committed_with_ids_and_short_cells_and_all_its_parts(name):
    notebook = read(name)
    first, *_ = notebook.cells
    assert (
        first.cell_type == "markdown" and first.source.startswith("# ") and "\n\n" in first.source
    )
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-z][a-z0-9-]*", i) for i in ids)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 18, f"{cell.id} is too long to be projected"
            assert not re.search(r"^\s*assert ", cell.source, re.MULTILINE), (
                f"{cell.id} asserts what the reader predicts: use PRINTED"
            )
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert (
        prose.count("<details>")
        == prose.count("</details>")
        == prose.count("<summary>Answer</summary>")
    )
    (minutes,) = re.findall(r"takes about (\d+) minutes", prose)
    assert int(minutes) <= 75 and re.search("You need|This lesson needs", prose), (
        "a lesson says what it assumes and how long it takes"
    )
    assert re.search(r"stop after \*", prose), "a lesson says where to stop"
    setup = "".join(cell.source for cell in notebook.cells[:6] if cell.cell_type == "code")
    launches = [cell.source for cell in notebook.cells if "p101.launch(" in cell.source]
    assert (
        "\nBACKEND = " in setup
        or "gloo even if you have GPUs" in prose
        or all('backend="sim"' in source for source in launches)
    ), "a lesson chooses its backend, says why it has none, or has no real ranks"
    assert "**Predict.**" in prose and "## What breaks" in prose and "## Exercises" in prose


def minutes_without_optional_parts(name: str) -> float:
    """An estimate: 130 words, 12 lines of code, or 2/3 of a prediction a minute; 5 for writing."""
    minutes, optional = 0.0, 0  # the level of the optional heading that we are under
    for cell in read(name).cells:
        heading = re.match(r"(#+) .*\n*", cell.source) if cell.cell_type == "markdown" else None
        if heading and len(heading[1]) <= (optional or 9):
            marked = "(optional)" in heading[0] or "(*Optional.*)" in cell.source
            optional = len(heading[1]) if marked else 0
        if optional:
            continue
        if cell.cell_type == "code":
            minutes += len([line for line in cell.source.splitlines() if line.strip()]) / 12
        else:
            text = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.DOTALL)
            minutes += len(text.split()) / 130
            minutes += 1.5 * text.count("> **Predict.") + 5 * text.count("> **Write it.")
    return minutes


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_takes_no_longer_than_it_says_without_its_optional_parts(name):
    prose = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    (said,) = re.findall(r"takes about (\d+) minutes", prose)
    assert minutes_without_optional_parts(name) <= 1.05 * int(said) <= 1.05 * 75
