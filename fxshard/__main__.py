"""``python -m fxshard``."""

import sys

from fxshard.cli.main import main

sys.exit(main())
