"""Plans that cut GPT and Llama for tensor parallelism: a style for each module, by name.

`*` is the number of a block.

trainer = p101.TensorParallelTrainer(
    model, p101.vocabulary_cross_entropy, optimizer, plan=GPT_PLAN
)

plan="auto" finds the same plans from the model's structure. With any other loss leave out the
embedding and the head.
"""

GPT_PLAN = {
    "embedding.token": "vocabulary",  # each rank has some of the rows
    "blocks.*.attention.query": "column",  # each rank has some of the heads
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.out": "row",  # one all-reduce
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",  # another all-reduce
    "head": "vocabulary",  # each rank has the logits of some tokens
}

LLAMA_PLAN = {
    **GPT_PLAN,  # key and value have kv_heads heads, of which each rank has some
    "blocks.*.mlp.gate": "column",
}
