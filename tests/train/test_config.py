import itertools
import math

import pytest

from switchhead.train.config import TrainingConfig
from switchhead.train.schedule import learning_rate_at

SIZES = {"steps": 10, "batch_size": 2, "chunk_length": 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("batch_size", -1), ("chunk_length", 0), ("learning_rate", 0.0), ("learning_rate", math.nan),
        ("warmup_steps", -1), ("betas", (0.9, 1.0)), ("eps", 0.0), ("weight_decay", -0.1), ("grad_clip", 0.0),
        ("seed", -1), ("dtype", "float64"), ("eval_every", 0), ("save_every", 0), ("keep_checkpoints", 0),
        ("validation_fraction", 1.0), ("micro_batch_size", 0), ("loss_chunk_length", 0), ("skip_nonfinite", -1),
        ("usage_every", 0), ("validation_tokens", 0), ("grad_clip", math.inf),
    ],
)  # fmt: skip
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field} is .*; it must be "):
        TrainingConfig(**{**SIZES, field: value})


def test_learning_rate_grows_linearly_then_falls_as_a_cosine():
    config = TrainingConfig(**{**SIZES, "steps": 100}, learning_rate=2.0, warmup_steps=4)
    rates = [learning_rate_at(step, config) for step in range(1, 101)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(earlier > later > 0 for earlier, later in itertools.pairwise(rates[3:]))
    assert learning_rate_at(4 + 97 // 2, config) + learning_rate_at(5 + 97 // 2, config) == pytest.approx(2.0)
    assert learning_rate_at(101, config) == pytest.approx(0, abs=1e-12)


def test_without_warm_up_the_first_step_has_the_highest_rate():
    config = TrainingConfig(**SIZES, learning_rate=2.0)
    assert learning_rate_at(1, config) == 2.0
    assert learning_rate_at(10, config) < learning_rate_at(9, config) < 2.0


def test_a_run_shorter_than_its_warm_up_ends_on_the_way():
    config = TrainingConfig(**SIZES, learning_rate=2.0, warmup_steps=20)
    assert learning_rate_at(10, config) == 1.0
