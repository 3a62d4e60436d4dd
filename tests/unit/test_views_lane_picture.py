"""Lanes as text: each column shows what took most of it."""

from opengyre.views.lane_picture import MAX_LANES, LaneStretch, text_lanes


def stretch(mode: str, start_s: float, end_s: float) -> LaneStretch:
    return LaneStretch(mode=mode, start_s=start_s, end_s=end_s)


def test_a_column_shows_the_mode_that_took_most_of_it() -> None:
    lane = [
        stretch("rollout", 0.0, 26.0),
        stretch("moving", 26.0, 31.0),
        stretch("training", 31.0, 100.0),
    ]
    first, scale, legend = text_lanes({"c0": lane}, end_s=100.0, num_columns=10)
    assert first == "   c0 ...#######"
    assert scale.split() == ["0", "0.0", "h"]
    assert "# training" in legend


def test_time_without_a_stretch_is_blank_and_a_short_run_is_drawn() -> None:
    assert text_lanes({"s0": [stretch("lost", 5.0, 10.0)]}, end_s=10.0, num_columns=4)[0] == (
        "   s0   !!"
    )
    assert text_lanes({"s0": []}, end_s=0.0, num_columns=4)[0] == "   s0     "


def test_more_engines_than_fit_are_counted() -> None:
    lanes = {f"c{n}": [stretch("rollout", 0.0, 1.0)] for n in range(MAX_LANES + 9)}
    lines = text_lanes(lanes, end_s=1.0)
    assert len(lines) == MAX_LANES + 3
    assert lines[-1].strip() == f"the first {MAX_LANES} of {MAX_LANES + 9} engines"
