from switchhead.eval import progress
from switchhead.eval.progress import shown_progress, tracked


def test_progress_is_shown_where_it_is_asked_for_and_changes_nothing(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    parts = [[1, 2], [3], [4, 5, 6]]
    assert list(tracked(parts, total=6, size=len, unit="texts")) == parts
    assert capsys.readouterr().err == ""
    with shown_progress():
        assert list(tracked(parts, total=6, size=len, unit="texts")) == parts
    assert "6.00/6.00" in capsys.readouterr().err
    assert list(tracked(parts, total=6, size=len, unit="texts")) == parts
    assert capsys.readouterr().err == ""


def test_whoever_asks_is_told_after_each_part_how_much_is_done():
    parts, shares = ["ab", "c", "d"], []
    assert list(tracked(parts, total=4, size=len, unit="letters", report=shares.append)) == parts
    assert shares == [0.5, 0.75, 1.0]
