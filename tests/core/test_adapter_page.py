"""The Python of the page on adapters runs as printed."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


def test_code_of_the_page_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {"__name__": "adapter_page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
