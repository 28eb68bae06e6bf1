"""`python -m parallel101`, and `torchrun … -m parallel101 run --record DIR train.py`: the same
command line as `parallel101`.
"""

import sys

from parallel101.cli import main

sys.exit(main())
