"""What serves ../tensor_parallel.py: a model's matrices are cut over the ranks of an axis, by a plan
beside the model.

{"*.up": "column", "*.down": "row"}     styles.py, plan.py: which module has which style, checked before anything is changed
auto.py                                 a plan from the model's structure
explain.py                              shape errors of code that counts the whole model's features, in words
group.py                                the ranks over which layers are cut, and the messages between them
loss.py                                 cross-entropy of logits that stay cut
sequence.py                             sequence parallel: between those layers activations are cut along time
"""
