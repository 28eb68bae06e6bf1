"""Pages of plain JavaScript that work without a server, a network or Python: a schedule to build by
hand, and others. What they are fed with is computed when the page is written.
"""
