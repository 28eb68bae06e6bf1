"""Pictures that are drawn from the record of a run, and from nothing else.

`collective_scene` shows who sent what to whom and what is in it; `timeline_scene` shows every rank's time.
A `Scene` displays itself in a notebook, and plays in a plain HTML page without a kernel or a network.
"""
