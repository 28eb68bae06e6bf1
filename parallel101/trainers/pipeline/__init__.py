"""Parts of ../pipeline_parallel.py: a model cut into stages on several ranks.

split.py            which modules each stage has
stages.py           the stages of this rank, and what they need to run
stage_messages.py   what travels between the stages
"""
