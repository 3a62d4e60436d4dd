"""The size check stops what is too big, and its waiver list can only shrink."""

from checks.size import MAX_WAIVERS, WAIVERS, find_breaches, measure, read_waivers

LONG = "def f():\n" + "    x = 1\n" * 60


def sizes(source: str) -> dict[tuple[str, str], int]:
    return {(item.where, item.kind): item.size for item in measure(source, "a.py")}


def test_methods_and_nested_functions_are_measured_by_their_full_name() -> None:
    found = sizes("class C:\n    def m(self, a, *, b, **c):\n        def g(): ...\n        g()\n")
    assert found[("a.py::C.m", "parameters")] == 3
    assert found[("a.py::C.m", "function_lines")] == 3
    assert found[("a.py::C.m.g", "function_lines")] == 1
    assert found[("a.py", "file_lines")] == 4


def test_a_function_of_61_lines_is_one_too_many() -> None:
    assert find_breaches(measure(LONG, "a.py"), {}, 0) == ["a.py::f: function_lines 61, at most 60"]
    assert find_breaches(measure(LONG[: -len("    x = 1\n")], "a.py"), {}, 0) == []


def test_seven_parameters_and_601_lines_are_one_too_many() -> None:
    source = "def f(a, b, c, d, *, e, f, g): ...\n" + "x = 1\n" * 600
    assert find_breaches(measure(source, "a.py"), {}, 0) == [
        "a.py: file_lines 601, at most 600",
        "a.py::f: parameters 7, at most 6",
    ]


NESTED = """
def f(x):
    if x:
        pass
    elif x:
        for _ in x:
            try:
                pass
            except OSError:
                def g():
                    if x: pass
"""


def test_nesting_counts_blocks_but_no_elif_and_no_inner_function() -> None:
    assert sizes(NESTED)[("a.py::f", "nesting")] == 3
    assert sizes(NESTED)[("a.py::f.g", "nesting")] == 1
    deeper = NESTED.replace("def g():", "with x:")
    assert find_breaches(measure(deeper, "a.py"), {}, 0) == ["a.py::f: nesting 5, at most 3"]
    cases = "def f(x):\n    match x:\n        case 1:\n            while x: pass\n"
    assert sizes(cases)[("a.py::f", "nesting")] == 2


def test_a_waiver_must_be_needed_exact_and_within_the_count() -> None:
    where = ("a.py::f", "function_lines")
    assert find_breaches(measure(LONG, "a.py"), {where: 61}, 1) == []
    assert "lower its waiver" in find_breaches(measure(LONG, "a.py"), {where: 70}, 1)[0]
    assert "not needed" in find_breaches(measure("", "a.py"), {where: 61}, 1)[0]
    assert "may only shrink" in find_breaches(measure(LONG, "a.py"), {where: 61}, 0)[0]


def test_the_waiver_list_is_no_longer_than_the_check_allows() -> None:
    assert len(read_waivers(WAIVERS.read_text())) <= MAX_WAIVERS
    assert read_waivers("# words\na.py::f function_lines 70 # why\n") == {
        ("a.py::f", "function_lines"): 70
    }
