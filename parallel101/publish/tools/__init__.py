"""Pages of plain JavaScript that work without a server, a network or Python: a schedule to build by
hand, and an atlas of collectives. What they are fed with is computed when the page is written.
"""
