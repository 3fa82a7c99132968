"""`python -m workers`: one worker process. Arguments are for people who look at a list of processes."""

from __future__ import annotations

import sys

from workers.main import main

if __name__ == "__main__":
    sys.exit(main())
