"""docs/serving.md: its Python runs against a server."""

from __future__ import annotations

import re
from pathlib import Path

from serving import Scripted, served, written

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_pages_python_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    with served(Scripted(lambda request: written({"reasoning": "An easy one.", "content": "Paris."})), name="small-chat") as s:
        exec(code.replace("http://127.0.0.1:8000", s.url), {})
    assert "An easy one. Paris." in capsys.readouterr().out
