"""The page docs/scheduling.md runs, and prints what stands on it."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_prints_what_the_page_says() -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    world: dict[str, object] = {"__name__": "page"}
    printed, compared = "", 0
    for kind, text in blocks:
        if kind == "python":
            out = StringIO()
            with redirect_stdout(out):
                exec(compile(text, str(PAGE), "exec"), world)
            printed = out.getvalue()
        else:
            assert printed == text
            compared += 1
    assert compared == 3


def test_the_toy_and_the_scheduler_move_every_cell_at_the_same_close() -> None:
    world: dict[str, object] = {"__name__": "page"}
    for kind, text in BLOCK.findall(PAGE.read_text())[:5]:
        if kind == "python":
            with redirect_stdout(StringIO()):
                exec(compile(text, str(PAGE), "exec"), world)
    toy, real, order = world["toy"], world["real"], world["order"]
    for seed in range(100, 150):
        closes = order(seed)  # type: ignore[operator]
        assert real(closes) == toy(32, closes)  # type: ignore[operator]
