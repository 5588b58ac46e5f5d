"""Shows tqdm's progress bar on its terminal, which it asks for its width in every step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "workloads"))

from steps import steps, wrong
from tqdm import tqdm  # type: ignore[import-untyped]

if not sys.stderr.isatty():
    wrong("this is not a terminal")
for _ in tqdm(steps(), desc="bar", dynamic_ncols=True, mininterval=0, miniters=1):
    pass
