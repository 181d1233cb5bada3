"""`python -m pellucid COMMAND` is `pellucid COMMAND`."""

import sys

from pellucid.cli import main

if __name__ == "__main__":
    sys.exit(main())
