"""``python -m fxshard``."""

import sys

from fxshard.cli import main

sys.exit(main())
