"""The planner: how a model should be laid out on many GPUs, and how long a step then takes.

known_models.py     the shape of a model: by name, from a JSON file, or from five numbers
layout_rules.py     which layouts there are, and which a HybridTrainer accepts
search.py           p101.plan(…): ranks all layouts that fit by the quick model of parallel101.cost
planned_layout.py   its result
simulated_step.py   runs a layout on virtual GPUs
trainer_call.py     the HybridTrainer call that builds it
plan_report.py      a plan as text and as JSON, and what it does not model
plan_picture.py     a plan as a picture
plan_command.py     parallel101 plan
published.py        the quick model against published training runs
"""
