"""`python -m tiny_llm.cli`: the same as `tiny-llm`."""

import sys

from . import main

sys.exit(main())
