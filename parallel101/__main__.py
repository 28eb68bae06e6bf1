"""`python -m parallel101`: the same command line as `parallel101`.

torchrun needs it: `torchrun … -m parallel101 run --record DIR train.py`.
"""

import sys

from parallel101.cli import main

sys.exit(main())
