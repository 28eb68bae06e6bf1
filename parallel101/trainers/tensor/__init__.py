"""Parts of ../tensor_parallel.py: the layers of a model that are cut, by a plan beside the model.

{"*.up": "column", "*.down": "row"}     plan.py: what a plan says, or the model's structure
tensor_axis.py                          each rank's part of the model
tensor_group.py                         the ranks over which layers are cut, and their messages
loss.py                                 cross-entropy of logits that stay cut
sequence.py                             sequence parallel: between, activations are cut along time
"""
