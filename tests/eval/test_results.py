import json
import math

import pytest

from switchhead.errors import RunError
from switchhead.eval import Score, TaskResult
from switchhead.eval.results import exponential, macro_average, mean, write_results

CONTENT = {"step": 7, "results": [{"task": "blimp"}, {"task": "cbt"}]}


def test_means_have_the_error_of_independent_values():
    assert mean([1.0, 0.0, 1.0, 1.0]) == Score(0.75, pytest.approx(math.sqrt(0.25 / 4)))
    assert mean([2.0]) == Score(2.0, None)


def test_macro_averages_count_groups_alike():
    assert macro_average([Score(0.5, 0.3), Score(1.0, 0.4)]) == Score(0.75, pytest.approx(0.25))
    assert macro_average([Score(0.5, 0.3), Score(1.0, None)]) == Score(0.75, None)


def test_exponentials_carry_the_error_to_first_order():
    assert exponential(Score(math.log(10), 0.01)) == Score(pytest.approx(10), pytest.approx(0.1))
    assert exponential(Score(1e4, 1.0)) == Score(math.inf)


def test_infinite_figures_are_null_in_json():
    scores = {"perplexity": Score(math.inf), "accuracy": mean([1.0, 1.0])}
    result = TaskResult(task="t", version=1, data="d", data_sha256="0", examples=1, scores=scores)
    assert result.as_json()["scores"] == {
        "perplexity": {"value": None, "standard_error": None},
        "accuracy": {"value": 1.0, "standard_error": 0.0},
    }
    assert json.loads(json.dumps(result.as_json())) == result.as_json()


def test_results_are_kept_in_the_run_and_never_overwritten(tmp_path):
    first, second = (write_results(CONTENT, out=None, run=tmp_path) for _ in range(2))
    assert first == tmp_path / "eval" / "step-7-blimp+cbt.json"
    assert second == tmp_path / "eval" / "step-7-blimp+cbt-2.json"
    assert json.loads(first.read_text()) == CONTENT
    out = tmp_path / "own.json"
    assert write_results(CONTENT, out=out, run=tmp_path) == out
    with pytest.raises(RunError, match=r"own\.json exists, and results are not overwritten"):
        write_results(CONTENT, out=out, run=None)
    assert write_results(CONTENT, out=None, run=None) is None


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "eval").write_text("a file where the directory should be")
    with pytest.raises(RunError, match=r"cannot write results to .*eval"):
        write_results(CONTENT, out=None, run=tmp_path)
    with pytest.raises(RunError, match=r"cannot write results to .*out\.json: there is no directory"):
        write_results(CONTENT, out=tmp_path / "no" / "out.json", run=None)
