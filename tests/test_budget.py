import numpy as np
import pytest

from tiny_llm.engine.budget import STEPS, StepCost

TRUE = (75.0, 1.5, 0.0017)
FAST = (1.2, 0.001, 2e-6)
PLACES = [(1, 300), (8, 3_000), (32, 9_000), (100, 30_000), (200, 60_000)]


def time(rows, keys, coefficients=TRUE):
    fixed, per_row, per_key = coefficients
    return fixed + per_row * rows + per_key * keys


def steps(seed, n=STEPS, noise=0.03):
    """Random steps of few rows and of many: (rows, keys, a factor near 1)."""
    random = np.random.default_rng(seed)
    for _ in range(n):
        few = random.random() < 0.6
        rows = int(random.integers(1, 33) if few else random.integers(33, 300))
        keys = int(rows * random.integers(10, 1000))
        yield rows, keys, 1 + noise * float(random.standard_normal())


def off(cost, factor=1.0, coefficients=TRUE):
    """The largest relative error of an estimate."""
    true = [(p, factor * time(*p, coefficients)) for p in PLACES]
    return max(abs(cost.estimate(*place) / ms - 1) for place, ms in true)


def test_nothing_is_known_before_the_first_step():
    cost = StepCost()
    assert cost.estimate(1, 1) is None
    assert cost.rows_within(100.0, 0) is None
    assert cost.coefficients is None
    for nothing in (0.0, -1.0, float("nan"), float("inf")):
        cost.add(1, 1, nothing)
    cost.add(0, 0, 5.0)
    assert cost.estimate(1, 1) is None


def test_a_few_exact_steps_are_met_exactly():
    cost = StepCost()
    for rows, keys in [(8, 1000), (100, 9000), (30, 20000)]:
        cost.add(rows, keys, time(rows, keys))
        assert cost.estimate(rows, keys) == pytest.approx(time(rows, keys), rel=1e-6)
    assert cost.coefficients == pytest.approx(TRUE, rel=1e-5)


@pytest.mark.parametrize(
    ("true", "far"), [(TRUE, 0.07), (FAST, 0.07), ((0.0, 3.0, 0.001), 0.15)]
)
@pytest.mark.parametrize("seed", range(5))
def test_coefficients_are_found_through_noise(true, far, seed):
    cost = StepCost()
    for rows, keys, noise in steps(seed):
        cost.add(rows, keys, time(rows, keys, true) * noise)
    assert off(cost, coefficients=true) < far
    assert cost.coefficients.fixed == pytest.approx(true[0], rel=0.1, abs=5)
    assert cost.coefficients.per_key == pytest.approx(true[2], rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_ten_times_the_time_is_ignored(seed):
    cost = StepCost()
    for n, (rows, keys, noise) in enumerate(steps(seed)):
        late = 10 if n % 20 == 7 or n == STEPS - 1 else 1
        cost.add(rows, keys, time(rows, keys) * noise * late)
    assert off(cost) < 0.1


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_changes_its_speed_is_followed_within_five_steps(factor, seed):
    cost = StepCost()
    known = 70
    for n, (rows, keys, noise) in enumerate(steps(seed, n=known + 60)):
        speed = factor if n >= known else 1.0
        cost.add(rows, keys, speed * time(rows, keys) * noise)
        if n == known:
            assert off(cost) < 0.2  # one step may be an accident
        if n >= known + 5:
            assert off(cost, factor) < 0.17
    assert off(cost, factor) < 0.07


@pytest.mark.parametrize("drift", [1.005, 0.995])
def test_a_machine_that_slowly_changes_is_followed(drift):
    cost = StepCost()
    for n, (rows, keys, noise) in enumerate(steps(0, n=200)):
        cost.add(rows, keys, drift**n * time(rows, keys) * noise)
        if n > 10:
            assert off(cost, drift**n) < 0.25


@pytest.mark.parametrize("seed", range(5))
def test_no_coefficient_is_negative_whatever_the_times(seed):
    random = np.random.default_rng(seed)
    cost = StepCost()
    for _ in range(100):
        rows = int(random.integers(1, 100))
        keys = rows * int(random.integers(1, 4000))
        cost.add(rows, keys, float(10 ** random.uniform(-2, 4)) / rows)
        assert min(cost.coefficients) >= 0
        assert cost.estimate(1, 1) > 0


def test_what_decoding_alone_leaves_open_stays_as_it_was():
    cost = StepCost()
    for rows, keys, noise in steps(0):
        cost.add(rows, keys, time(rows, keys) * noise)
    before = cost.rows_within(250.0, 100, 8, 3000)
    for n in range(2 * STEPS):
        cost.add(8, 8 * (400 + n), time(8, 8 * (400 + n)))
    assert cost.rows_within(250.0, 100, 8, 3000) == pytest.approx(before, rel=0.25)


def test_rows_are_not_thought_free_while_only_decoding_was_seen():
    cost = StepCost()
    for n in range(30):
        cost.add(8, 8 * (100 + n), time(8, 8 * (100 + n)))
    allowed = cost.rows_within(2.5 * cost.estimate(8, 1000), 0, 8, 1000)
    assert 8 <= allowed <= 64
    cost.add(8 + allowed, 2000, time(8 + allowed, 2000))  # and now it knows
    assert cost.coefficients.per_row == pytest.approx(TRUE[1], rel=0.1)


def test_hardly_varying_rows_do_not_tell_what_a_row_costs():
    cost = StepCost()
    for rows, keys, noise in steps(0):
        cost.add(rows, keys, time(rows, keys) * noise)
    before = cost.rows_within(250.0, 100, 8, 3000)
    for n, (_, _, noise) in enumerate(steps(1, 2 * STEPS)):
        rows = 7 + n % 2
        cost.add(rows, rows * (400 + n), time(rows, rows * (400 + n)) * noise)
        if n % 16 == 0:
            allowed = cost.rows_within(250.0, 100, 8, 3000)
            assert allowed == pytest.approx(before, rel=0.4)


def test_rows_that_cost_nothing_may_cost_something_later():
    cost = StepCost()
    for rows, keys, _ in steps(0, 3 * STEPS):
        cost.add(rows, keys, 75.0 - rows / 100)
        known = cost.coefficients
    assert known.per_row == 0
    for rows, keys, _ in steps(1):
        cost.add(rows, keys, time(rows, keys))
    assert cost.coefficients == pytest.approx(TRUE, rel=0.01)


@pytest.mark.parametrize("true", [TRUE, (10.0, 0.01, 0.05)])
@pytest.mark.parametrize("context", [0, 1, 500, 8000])
@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (8, 4000)])
def test_rows_within_are_the_most_that_fit(true, context, rows, keys):
    cost = StepCost()
    for r, k in [(8, 1000), (100, 9000), (30, 20000), (60, 60000)]:
        cost.add(r, k, time(r, k, true))

    def with_rows(n):
        return cost.estimate(rows + n, keys + n * context + n * (n + 1) // 2)

    for ms in (0.0, 80.0, 100.0, 250.0, 500.0):
        n = cost.rows_within(ms, context, rows, keys)
        assert n == 0 or with_rows(n) <= ms * (1 + 1e-6)
        assert with_rows(n + 1) > ms
    for n in (1, 8, 100):  # what fits exactly does
        assert cost.rows_within(with_rows(n), context, rows, keys) == n


def test_rows_that_cost_nothing_are_many_but_a_number():
    cost = StepCost()
    for rows in range(1, 65):
        cost.add(rows, rows * 100, 75.0 - rows / 10)  # even quicker with more
    assert cost.coefficients.per_row == 0
    assert 1000 < cost.rows_within(500.0, 0) < 1 << 31
    assert cost.rows_within(10.0, 0) == 0
