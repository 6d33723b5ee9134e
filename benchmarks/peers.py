#!/usr/bin/env python3
"""The name by which scripts/bench.sh calls baselines.py."""

import sys

from baselines import main

if __name__ == "__main__":
    sys.exit(main())
