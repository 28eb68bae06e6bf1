"""Every lesson runs from top to bottom, shows the numbers that its text states, and becomes a page
that plays offline. One that `make lessons` has run, and nothing has changed since, isn't run again.
"""

from __future__ import annotations

import os
import re

import pytest

from parallel101.laboratory.publish.execute import run_notebook
from parallel101.laboratory.publish.page import lesson_body
from parallel101.laboratory.publish.write_site import last_run
from tests.lessons.lesson import LESSONS, pictures, printed, prose, read

NAMES = sorted(path.stem for path in LESSONS.glob("*.ipynb"))
DRAWING_CALL = re.compile(  # in the last statement of a cell
    r"(\.(animate|timeline|picture|before_after)\(|[a-z]+_scene\(|sweep\(|explore_collective\(|LiveLoss\()"
)
MARKS = {" ": r"\s+", "…": r"[\s\S]*?", "#": r"\d", "TINY": r"-?(\d(\.\d)?e-1[2-9]|0(\.0)?e\+00)"}
SAME = "the same messages as the package's"
EQUAL = "equal to one process largest differences … % … gradient … % … update"  # what verify prints

# What a cell must show, in its output or in its picture, where the text around it states numbers.
# No cell asserts it: that would tell the answer before the run. … is anything, # a digit, TINY
# rounding in float64, and a space any space.
SHOWN = {
    "00_ranks": {
        "notes": "[[0], [1], [2], [3]] the notebook's notes: []",
        "message-check": "rank 0 sent: 32 bytes in 1 message rank 1 received: 32 bytes",
        "waiting-check": "for 32 bytes",
        "deadlock-run": "waits in send to rank 1 … cycle: rank 0 → rank 1 → rank 0 … irecv",
        "deadlock-eager": "4 bytes: fine 400 bytes: fine 40000 bytes: deadlock",
        "isend-run": "[1.0, 0.0]",
        "isend-changed": "rank 0 changed a tensor that was still being sent",
        "dies-run": "rank 2 raised ZeroDivisionError … in careless",
        "dies-killed": "rank 2 exited with code 7",
        "sim-run": "the virtual clock: 64.0 s … the token counted: 64 ranks",
        "sim-gloo": "[4, 1, 2, 3]",
        "nccl-run": "rank 0's send to rank 1 waits in the queue behind its receive from rank 1",
        "nccl-batch": "[1.0, 0.0]",
        "script-torchrun": "results: [2, 1] results: [2, 1]",
        "exercise-1": "swap: 1 steps",
    },
    "01_collectives": {
        "flat-count": f"steps ? 7 … path ? 28,672 … sends ? 28,672 {SAME}",
        "tree-count": f"steps 7 3 … path 28,672 12,288 … sends 28,672 12,288 {SAME}",
        "scatter-count": f"steps 7 7 … path 28,672 3,584 … sends 28,672 3,584 {SAME}",
        "scatter-table": "The row of rank 0 has become a column.",
        "gather-count": f"steps 7 7 … path 3,584 3,584 … sends 3,584 512 {SAME}",
        "reduce-count": f"steps 3 3 … path 12,288 12,288 … sends 12,288 4,096 {SAME}",
        "all-gather-count": f"steps ? 7 … path ? 3,584 … sends ? 3,584 {SAME}",
        "reduce-scatter-count": f"steps 7 7 … path 3,584 3,584 … sends 3,584 3,584 {SAME}",
        "naive-count": f"steps 3 3 6 … path … 24,576 … sends … 12,288 {SAME}",
        "ring-count": f"steps ? 6 14 … path ? 24,576 7,168 … sends ? 12,288 7,168 {SAME}",
        "all-to-all-count": f"steps 7 7 … path 3,584 3,584 … sends 3,584 3,584 {SAME}",
        "barrier-count": f"steps 3 … {SAME}",
        "tree-scale": "63 steps flat, 6 in a tree 256 ranks: 255 steps flat, 8 in a tree",
        "data-parallel-run": "rank 3 differs by TINY",
        "ring-scale": "1.00 n in the ring, 2 n … 1.97 n in the ring, 12 n in two trees",
        "torch-run": "[[True, True, True], [True, True, True], [True, True, True], [True, True, T",
        "bug-run": "Step 3 of 6 … On rank 0, chunk d now contains rank 0's data more than once",
        "bug-numbers": "[4.0, 4.0, 10.0, 10.0, ",
        "barrier-watch": "Step 3 of 3",
    },
    "02_algorithms_and_cost": {
        "problem-run": "flat 0.28 ms tree 0.12 ms ring 0.28 ms … 47.26 ms tree 20.25 ms ring 6.15",
        "doubling-count": f"the run: 3 … the run: 12,288 … the run: 12,288 {SAME}",
        "crossing": "they cross at 220 kB α / β is 25 kB",
        "chain-picture": "On the critical path: 11 messages",
        "chain-run": "32 segments … 4.74 ms tree: 10.13 ms … 6.07 ms n · β: 3.36 ms",
        "fit-run": "fit: α = … 4,194,304 bytes: … × the line",
        "bus-run": "all_reduce 50.0 33.3 28.6 50.0 … all_to_all 100.0 66.7 57.1 50.0",
        "levels-run": "0.66 s; GPUs 0–7 send n × 0 0 0 0 0 0 0 1.88 … 0.89 s; … n × 0.125 … "
        "5.25 s; … 0 0 1.88 … 0.89 s",
        "nccl-run": "tree LL; … tree LL128; … ring Simple; on 128 nodes: tree Simple",
        "auto-rule": "algorithm='recursive_doubling' … algorithm='reduce_broadcast', max_ranks=8",
        "node-picture": "450 GB/s per GPU … 64 GB/s. Each card … rail: 50 GB/s",
    },
    "03_adjoints": {
        "problem-run": "element 0 of tensors does not require grad",
        "own-run": "one process: 7e-01",
        "one-alone": "in one process: 12.0",
        "one-run": "gradient of x: 12.0",
        "backward-watch": "Backward: ring reduce-scatter",
        "backward-bytes": "[48, 48, 48, 48] … backward: [48, 48, 48, 48]",
        "function-run": "by hand distance from one process: TINY p101.all_gather … TINY",
        "learn-run": "right: 15.6 to 0.968; … 15.6 to 1.06; n times too large: 15.6 to 0.968",
        "test-run": "all ranks: … difference TINY",
        "test-all-run": "equal … " * 7 + "equal",
        "learn-test": "equal ratio 1.000 own part only … different ratio … different ratio 4.000",
        "loss-run": "measured: 4.000",
        "loss-once": "factor: 1.000 all_reduce 480 bytes … reduce_from_group 240 bytes",
        "pair-run": "clone … copy_to_group distance from one process: TINY",
        "products-run": "multiply: 0 … AllGather_X, then multiply: 576 … AllReduce_X: 768",
        "training-run": "nothing AllReduce W nothing … AllGather W ReduceScatter W AllGather W … "
        "nothing nothing AllReduce X … AllReduce Y nothing nothing",
        "break-place-run": "clone [1.0, 2.0, 3.0, 4.0] exp [4.0, 8.0, 12.0, 16.0]",
        "break-everything-run": "different all_reduce … equal all_to_all … different",
        "break-slice-run": "equal ring_all_gather_backward 3,000 … all_reduce_then_slice 6,000",
        "break-absent-run": "waits in recv from rank 3 (returned), … weights.sum().backward()",
    },
    "04_data_parallel": {
        "by-hand-run": "2 ranks: ['TINY', 'TINY'] … 4 ranks: ['TINY', 'TINY', 'TINY', 'TINY']",
        "price-run": "sent: [9640, 9680, 9680, 9640] by rank; S is 1288",
        "lanes-sim": "'naive': '17.8 s', 'bucketed': '17.0 s', 'overlapped': '14.0 s'",
        "real-check": "the first bucket was sent # … ms before",
        "train-run": "1 rank: 5. … 2 ranks: 5.",
        "train-check": f"{EQUAL} … a step on 1 rank median",
        "scaling-run": "strong: … measured 10.# times … weak: … measured 2#.# times",
        "accumulate-run": "{'accumulate=1': 66592, 'accumulate=4': 66592} … 14.0 s … 15.5 s",
        "break-adamw-run": "always four times too long: #e-0# … from step 25 on: #e-0",
        "break-start-error": "layers.0.weight … sync=True",
        "break-uneven-check": "10 samples: not right yet, #.#e-0# from one rank 12 samples: right,",
        "break-labels-run": "Return (sum of losses, their weight) … loss: #",
        "break-every-run": "[1288, 3864]",
    },
    "05_sharding": {
        "pain-run": "measured: 16.00 bytes per parameter, with 264,192 parameters",
        "by-hand-run": "blocks: [41, 40, 40, 40] … 4 ranks: ['TINY', 'TINY', 'TINY', 'TINY']",
        "stages-run": "kept: 10.## bytes … kept: 7.## bytes … kept: 4.## bytes",
        "stages-check": "1.00 1.00 0.25 … 1.00 0.25 0.25 … 0.25 0.25 0.25 … 2.0 layers",
        "price-check": "2.00 1 you: ? the run: 2.00 2 you: ? the run: 2.00 3 you: ? the run: 3.00",
        "lanes-sim": "on demand: 32.4 s … prefetched: 20.4 s",
        "save-check": "the first 15 are those of the two ranks: True",
        "design-run": "nothing TINY … C #e-02 … D #e-02 … E #e-01",
        "design-same": "nothing TINY … C TINY … D TINY … E #e-01",
        "break-clip-run": "by_local_norm: #.#e-0",
        "break-leak-run": "gathered at once, at most: 34 layers",
        "break-all-reduce-run": "the same blocks: True … [6000, 3000]",
        "break-optimizer-run": "differs by … looks at whole matrices … DataParallelTrainer",
    },
    "06_tensor_parallel": {
        "pain-run": "measured: 1.00",
        "ways-run": "sent: [6144, … TINY from … sent: [12288, … TINY from",
        "lecture-run": "2 ranks: TINY … 4 ranks: TINY",
        "pair-run": "measured: 2.5",
        "between-run": "gelu … TINY … relu … TINY … softmax … e-0# … layer_norm … e",
        "backward-nothing": "'dW': 'TINY', 'dV': 'TINY', 'dX': '#e",
        "backward-sum": "3 ranks: {'dW': 'TINY', 'dV': 'TINY', 'dX': 'TINY'}",
        "mirror-code": "[12288, 12288, 12288, 12288] … 'dW': 'TINY', 'dV': 'TINY', 'dX': 'TINY'",
        "overlap-run": "{'wait at once': 2.8, 'overlapped': 2.0}",
        "forward-run": "{'pieces = 1': 3.6, 'pieces = 4': 2.4}",
        "attention-run": "shared=False: 3 in … TINY from … shared=True: 1 in … TINY from",
        "vocabulary-check": "6291456, 'cut_loss': 9216} … measured: 683 … rows are right: True",
        "sequence-check": "between the pairs: 16384 bytes … pairs: 4096 bytes gradients: TINY",
        "plan-picture": "64 × 64, columns cut into 4 × 16 … 256 × 64, rows cut into 4 × 64",
        "memory-run": "the same bytes with one sample: True",
        "cost-check": "counted: 393,216 bytes",
        "cost-theory": "393,216 … 393,216 … 299,520 … 299,520 ratio: 1.31",
        "break-bias-run": "True 3.0e+00 … False TINY",
        "break-dx-check": "first pair, V: #e-01 … second pair, W: TINY … second pair, V: TINY",
    },
    "07_pipeline": {
        "one-batch-run": "rank 0 works 24 s of 96 s: 25 % … makespan 96 s · bubble rate 75.0 %",
        "gpipe-check": "P = 1: TINY … P = 2: TINY … P = 4: TINY",
        "bubble-run": "60 s m = 4 … 42 s m = 8 … 33 s … makespan 33 s · bubble rate 27.3 %",
        "bubble-check": "m = 8: formula 33 s, run 33 s, bubble: 27% of the step, 38% of the ideal",
        "order-check": "not right yet: 15 s, activations held: [4, 4]",
        "loop-run": "held: (8, 8, 8, 8) … TINY 1F1B held: (4, 3, 2, 1) … TINY … makespan 33 s",
        "loop-time": "33.0 [4, 3, 2, 1] 27.3%",
        "interleaved-check": "9.0 and 4.5 s … 48 and 112 … 4 and 11 half as large",
        "split-run": "zb-h1: TINY … zb-h2: TINY … ZB-H1 … 11.1 % … ZB-H2 … 0.0 %",
        "split-check": "'1F1B': '9 s', 'ZB-H1': '3 s', 'ZB-H2': '0 s'}",
        "published-run": "ours: 0.2431 … ours: 0.1585 … ours: 0.1083",
        "trainer-run": f"gpipe … TINY 1f1b … TINY … TINY zb-h2: {EQUAL}",
        "tied-check": "gradient of the tied … TINY from … update of the tied … TINY from",
        "break-send-run": "GPipe: finishes, TINY from … 1F1B: deadlock",
        "break-loss-show": "8.00 times as long, cosine 1.000 zero_grad before each … cosine -0.",
        "hang-ours": "GPipe: finishes, TINY … rank 2's receive from rank 3 waits in the queue",
        "hang-two-groups": "direction: TINY from",
    },
    "08_three_axes": {
        "pain-run": "2 16.0 3# 11% 4 16.0 10# 27% 8 16.0 25# 47%",
        "mesh-run": "rank 5 = dp 1, pp 0, tp 1: dp [1, 5] pp [5, 7] tp [4, 5]",
        "file-held": "1.qkv.weight 48 32 cut",
        "file-run": "step 2: loss #.####, apart by TINY; norm #.####, apart by TINY",
        "trainer-run": "equal to one process … norm TINY TINY … gradient … update",
        "describe-run": "embedding.token.weight: on stages 0, 1 over pp",
        "bytes-theory": "36,480 the run: 36,480 … 39,424 the run: 39,424 … "
        "163,840 the run: 163,840",
        "tp-check": "tp 2 … right: True tp 4 … right: False",
        "zero-run": "counted: 4.0# bytes … ZeRO-1 … 3.0# bytes … ZeRO-3 … 2.0# bytes",
        "links-run": "14.9 s … 18.1 s … 38.4 s",
        "train-check": "first step 4.## last ten steps: ",
        "published-numbers": "82 s, 768 GPUs 67 s, 1536 GPUs 67 s … 21 s … speed: 5 s",
        "runs-data": "= 1,536 GPUs … = 3,072 GPUs … = 16,384 GPUs",
        "runs-run": "1.8 1046.9 0.0 0.0 0.0% … 31.5 6.6 13.4 1127.4 11.0% … "
        "6.7 18.8 1.1 236.8 48.4%",
        "interleaved-run": "from the bubble: 407 published: 400",
        "domain-run": "a step: 6.2 s; … tp: 0.53 s on NVLink, 4.74 s … 8 GPUs … 72 GPUs",
        "break-share-run": "step 2: loss 4.####, apart by #e-0",
        "break-order-run": "src=0 is this rank's own position",
    },
    "09_memory": {
        "problem-run": "112.0 GB … 51.5 GB together 164 GB",
        "bits-run": "bfloat16: … 1.0000 torch.float32: … 2.0000",
        "states-run": "16.00 bytes … 16.00 bytes … 18.00 bytes … 8.00 bytes",
        "count-run": "counted: 20480 10,240 bytes … 10,240 bytes",
        "formula-run": "661,504 formula: 655,360 bytes the formula misses 0.93 % … = 6144.0",
        "surprise-run": "unfused × 2.41 × 2.68 fused × 2.00 × 2.00",
        "logits-run": "1024 … 2,121,728 … 1,117,700 … 2,121,728 … 4,263,428",
        "logits-pieces": "21,###,### bytes … 4,###,### bytes",
        "price-run": "none 34.7 MB … selective 18.9 MB … full 9.2 MB",
        "random-run": "=False: off by ## … =True: off by 0%",
        "pipeline-run": "2.66 MB rank 1: 2.00 MB rank 2: 1.33 MB rank 3: 0.76 MB … rank 0: 0.45 MB",
        "sums-run": "2 ranks: 2.4e-03 … 32 ranks: 7.1e-03 … thousand ones in bfloat16: 256",
        "sums-bytes": "0.79 MB … 1.58 MB",
        "fp8-run": "2.6%, MXFP8 2.6%, NVFP4 9.#% … MXFP8 2.6%, NVFP4 9.#%",
        "fp8-sum-run": "16 ranks: packed by every rank #.#%, packed once 1.#% packed_once: 224,730 "
        "bytes, in bfloat16 435,840 gathered: 224,730",
        "breaks-fp16": "0.0] [ … 9.9",
        "breaks-norm-run": "'blocks.0.1' is a BatchNorm1d",
    },
    "10_sequences_and_experts": {
        "problem-run": "32 GiB … 4 GiB",
        "merge-run": "the mean is off by 26%",
        "ring-run": "sent: 3 messages, 3,072 bytes off by TINY",
        "ring-watch": "all-gather",
        "triangle-run": "busy: 53.5% 1.93 s; without a mask 2.05 s",
        "zigzag-run": "busy: 100.0% 1.03 s",
        "ulysses-run": "ring 12,288 bytes, Ulysses 6,144 … ring 3,072 bytes, Ulysses 3,840",
        "cp-step": EQUAL,
        "cp-bytes": "the run: 8.00 A … 'cp': 262144",
        "experts-run": "46.7 billion … 12.9 billion",
        "hot-run": "[24, 146, 71, 15] 146 ms",
        "balance-code": "equally: 1 one expert: 4",
        "balance-train": "step 0: 1.40 … step 200: 1.0 … 7# ms",
        "ep-program": EQUAL,
        "ep-bytes": "the run: #.## A",
        "breaks-mask-run": "rank 0: off by 0% rank 1: off by ##",
        "breaks-mix-run": "this layout does not compute what one process does",
    },
    "11_a_thousand_gpus": {
        "problem-run": "1.75 s … 73 days … on 1,024 GPUs: 260 days",
        "roofline-run": "computed: 310 tokens",
        "layer-run": "17.8 ranks … tp 8: messages take 39% … 2.0 ranks … tp 4: messages take 152%",
        "tokens-run": "4096 tokens per GPU, 2475 needed … 256 tokens",
        "mfu-run": "HFU 47.4%, MFU 35.6%",
        "llama-mfu-run": "computed: 32%",
        "virtual-gpus": "rank 0: 92 TFLOP … rank 4: 143 TFLOP",
        "layout-run": "5.## s, MFU 3#%, 6# GB … 2# GB … matmul 3.0# … tp 0.8# … bubble 0.8",
        "layout-simulate": "virtual GPUs: 5.## s, … 0.#%",
        "planner-best": "4.7# s, MFU 4#% … matmul 3.5# … tp 0.4# … (256, 4), … zero_stage=3, … "
        'recompute="full" … 0.## s less: 3# days',
        "domain-run": "8 GPUs: 0.9 ms, 16 GPUs: 5.# ms",
        "published-run": "0.#% … 0.#% … 0.#%",
        "llama-run": "+12%; … -10% 16384 GPUs … +11%; … -26%",
        "breaks-run": "would do is 32 … a round number: … tp over two nodes: … heads",
    },
    "12_keep_it_running": {
        "problem-run": "49.5 hours … 3.1 hours",
        "stragglers-run": "computed: 24% longer … makespan 70.5",
        "stragglers-many-run": "0.1% of the steps … 9.7% of the steps … 80.6% of the steps",
        "saving-run": "121 minutes, 4.1% … 25 minutes, 0.8% … 30 minutes, 16.3% … 6 minutes, 3.4%",
        "background-run": "988 GB in all, 0.97 GB … copy 15 ms, write 494 ms",
        "notice-run": "rank 2 exited with code 7 … noticed after #.# s, … 5.4% of 54 days",
        "spares-run": "0.5 nodes in repair, 3 spares … 7.8 nodes in repair, 15 spares",
        "replicas-run": "'#e-02', '#e-01', '#e-02'] 12.# s … ['TINY', 'TINY', 'TINY', 'TINY'] 12",
        "together-run": "70.2% … 83.2% … 88.3% … 95.8%",
    },
}


def shows(text: str, template: str) -> bool:
    parts = re.split(r"(\s*…\s*|#|TINY|\s+)", template)
    patterns = (MARKS.get(part.strip() or part, re.escape(part)) for part in parts)
    return bool(re.search("".join(patterns), text))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_shows_what_its_text_says(name):
    path = LESSONS / f"{name}.ipynb"
    if (notebook := last_run(path, LESSONS.parent / "site")) is None:
        before = os.times()
        notebook = run_notebook(path, timeout=150)
        after = os.times()
        busy = sum(after[2:4]) - sum(before[2:4])  # of the kernel and its ranks
        assert busy < 60, "a lesson takes 30 s on two cores, which is 60 s of work, or less"
    cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    for cell in cells.values():
        if DRAWING_CALL.search(cell.source.rpartition("\n\n")[2]):
            assert len(pictures(cell)) == 1, cell.id
    for cell_id, template in SHOWN[name].items():
        text = "\n".join([printed(cells[cell_id]), *pictures(cells[cell_id])])
        assert shows(text, template), (cell_id, template, printed(cells[cell_id]))
    page = lesson_body(notebook, LESSONS)  # raises an error if something must be fetched
    assert page.count("<figure") == sum(len(pictures(cell)) for cell in cells.values())
    explorers = [cell for cell in cells.values() if "p101.explore_collective(" in cell.source]
    assert page.count("needs-kernel") == len(explorers)


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_committed_with_ids_and_short_cells_and_all_its_parts(name):
    cells, text = read(name).cells, prose(name)
    assert cells[0].source.startswith("# ") and "\n\n" in cells[0].source
    ids = [cell.id for cell in cells]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-z][a-z0-9-]*", i) for i in ids)
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert all(len(source.splitlines()) <= 18 for source in code), "too long to be projected"
    assert not any(re.search(r"^\s*assert ", source, re.M) for source in code), "use SHOWN"
    for part in ("**Predict.**", "## What breaks", "## Exercises", "You need", "stop after *"):
        assert part in text
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>Answer<")
    launches = [source for source in code if "p101.launch(" in source]
    assert (
        any("\nBACKEND = " in source for source in code[:5])
        or "gloo even if you have GPUs" in text
        or all('backend="sim"' in source for source in launches)
    ), "a lesson chooses its backend, says why it has none, or has no real ranks"


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
    (said,) = re.findall(r"takes about (\d+) minutes", prose(name))
    assert minutes_without_optional_parts(name) <= 1.05 * int(said) <= 1.05 * 75
