"""``python -m fastpack_trl``: the same as ``fastpack-trl``. Also the module that launchers start."""

from __future__ import annotations

import sys

from fastpack_trl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
