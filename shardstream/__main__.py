"""``python -m shardstream``: the command line."""

import sys

from shardstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
