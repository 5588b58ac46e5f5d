"""`python -m migrator.cli`, where the script is not installed."""

import sys

from migrator.cli import main

if __name__ == "__main__":
    sys.exit(main())
