"""The commands of docs/quickstart.md, so that what a new user is told is what the tests do."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
#: The node in whose words the page is written where every node does the same.
EXAMPLE = "node-1"


def commands(name: str, node: str = EXAMPLE) -> str:
    """The block between <!-- name --> and <!-- /name -->, as the page tells it for a node: "with its own file"."""
    found = re.search(rf"<!-- {name} -->\n```bash\n(.*?)```\n<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    assert found, f"{PAGE.name} has no block {name}"
    return found[1].replace(EXAMPLE, node)
