"""Starts the command line: as a file, which is how the launcher does it, or as `python -m gpu_skills`."""

from __future__ import annotations

import os
import sys

if not __package__:
    # Under -I the folder of a script is not on the path, and the launcher may have come through links.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
sys.argv[0] = "gpu"

try:
    from gpu_skills.cli.main import main
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("gpu_skills"):
        raise
    print(
        f"gpu: the environment {sys.prefix} lacks {missing.name}; "
        f"next: remove that folder and run the command again [environment_failed]",
        file=sys.stderr,
    )
    sys.exit(1)

sys.exit(main())
