from switchhead.train.loss_scale import GROWTH_INTERVAL, LossScale


def test_only_float16_scales():
    for dtype in ("float32", "bfloat16"):
        scale = LossScale.of(dtype)
        assert not scale.overflowed(finite=False)
        for finite in (True, False):
            scale.update(finite=finite)
        assert scale.scale == 1


def test_the_scale_halves_at_once_and_doubles_after_many_finite_steps():
    scale = LossScale.of("float16")
    first = scale.scale
    assert scale.overflowed(finite=False)
    assert not scale.overflowed(finite=True)
    scale.update(finite=False)
    assert scale.scale == first / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(finite=True)
    assert scale.scale == first / 2
    copy = LossScale.of("float16")
    copy.restore(scale.state())
    copy.update(finite=True)
    assert copy.scale == first
    scale.update(finite=False)  # starts counting anew
    scale.update(finite=True)
    assert scale.scale == first / 4


def test_a_gradient_that_overflows_unscaled_is_no_fault_of_the_scale():
    scale = LossScale(scale=2.0, grows=True)
    scale.update(finite=False)
    assert scale.scale == 1
    assert not scale.overflowed(finite=False)


def test_a_checkpoint_of_another_dtype_leaves_the_scale_as_it_is():
    half, single = LossScale.of("float16"), LossScale.of("float32")
    states = half.state(), single.state()
    half.restore(states[1])
    single.restore(states[0])
    assert (half, single) == (LossScale.of("float16"), LossScale.of("float32"))
