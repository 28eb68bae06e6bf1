"""The record of a run: every message, collective and span, as it happened.

events.py says what an event is, and trace.py what a `Trace` can do. On real ranks,
recorded_group.py wraps torch's process groups, and recorder.py writes the events. last_events.py
keeps the newest of a long run, and totals.py sums the others. calls.py finds calls that do not
match, and wait_for.py finds deadlocks. spans.py is for the program itself. What a record means is
computed in `laboratory.analysis`; pictures of it are drawn in `laboratory.viz`.
"""
