"""Parts of ../pipeline_parallel.py: a model cut into stages on several ranks.

stages.py           which modules each stage has, and what this rank needs to run its own
stage_messages.py   what travels between the stages
"""
