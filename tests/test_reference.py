"""The NumPy reference against the recorded values, closed forms and itself."""

from functools import cache

import numpy as np
import pytest
import reference
from reference import assert_golden

FILES = [
    "NormFace",
    "CosFace",
    "AMSoftmax",
    "ArcFace",
    "AdaCos",
    "SoftmaxHead",
    "LSoftmax",
    "SphereFace",
    "CombinedMargin",
    "CurricularFace",
    "AdaFace",
    "MagFace",
    "subcenters",
    "focal",
    "ignore_class",
]
CASES = {f"{file}: {case['name']}": case for file in FILES for case in reference.golden_cases(file)}

# Heads whose gradient is written out: the slope of their target, given its cosine and the margin.
SLOPES = {
    "NormFace": lambda cosine, margin: 1.0,
    "CosFace": lambda cosine, margin: 1.0,
    "AMSoftmax": lambda cosine, margin: 1.0,
    "AdaCos": lambda cosine, margin: 1.0,
    "ArcFace": reference.arcface_slope,
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def settings_of(case):
    settings = {name: value for name, value in case["config"].items() if name != "num_classes"}
    settings |= case.get("margin_rule", {"config": {}})["config"]
    annealing = case.get("annealing", {})
    names = {"floor": "lambda_min"}
    return settings | {names.get(name, f"lambda_{name}"): v for name, v in annealing.items()}


def head_of(case):
    """(embeddings, centers, labels, state) -> (logits, state), with the settings of the case."""
    head = reference.HEADS["CombinedMargin" if "margin_rule" in case else case["head"]]
    settings = settings_of(case)
    return lambda *arguments: head(*arguments, **settings)


@cache
def steps_of(name):
    """[(recorded step, state before, logits, state after, loss function)] of one case."""
    case = CASES[name]
    head, centers = head_of(case), np.array(case["centers"])
    ignore_class = case["config"].get("ignore_class")
    focal_gamma = case.get("focal_gamma", 0.0)
    state = {"iteration": case["start_iteration"]} if "start_iteration" in case else None
    steps = []
    for step in case["steps"]:
        embeddings, labels = np.array(step["embeddings"]), step["labels"]

        def loss(x, w, labels=labels, before=state):
            return reference.softmax_loss(
                head(x, w, labels, before)[0], labels, ignore_class, focal_gamma
            )

        logits, after = head(embeddings, centers, labels, state)
        steps.append((step, state, logits, after, loss))
        state = after
    return steps


every_case = pytest.mark.parametrize("name", CASES)
every_step = pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, id=f"{name}, step {number + 1}")
        for name, case in CASES.items()
        for number in range(len(case["steps"]))
    ],
)


@every_case
def test_plain_logits_equal_golden_values(name):
    case = CASES[name]
    embeddings, centers = np.array(case["steps"][0]["embeddings"]), np.array(case["centers"])
    logits, _ = head_of(case)(embeddings, centers)
    assert_golden(logits, case["plain_logits"], **EXACT)


@every_step
def test_logits_loss_and_state_equal_golden_values(name, number):
    case = CASES[name]
    step, _, logits, state, loss = steps_of(name)[number]
    assert_golden(logits, step["logits"], **EXACT)
    losses = loss(np.array(step["embeddings"]), np.array(case["centers"]))
    assert_golden(losses, step["loss"], **EXACT)
    for key, value in step.get("state", {}).items():
        np.testing.assert_allclose(state[key], value, rtol=1e-9, err_msg=key)


@every_step
def test_gradients_equal_golden_values(name, number):
    case = CASES[name]
    step, _, _, _, loss = steps_of(name)[number]
    embeddings, centers = np.array(step["embeddings"]), np.array(case["centers"])
    of_embeddings, of_centers = reference.gradients(loss, embeddings, centers)
    assert_golden(of_embeddings, step["grad_embeddings"], **EXACT)
    assert_golden(of_centers, step["grad_centers"], **EXACT)


@pytest.mark.parametrize("case", reference.golden_cases("MagFace"), ids=lambda case: case["name"])
def test_magface_regularizer_equals_golden_values(case):
    step, _, _, _, loss = steps_of(f"MagFace: {case['name']}")[0]
    embeddings, labels = np.array(step["embeddings"]), step["labels"]

    def total(x, w):
        return loss(x, w) + reference.magface_regularizer(x, labels)

    assert_golden(reference.magface_regularizer(embeddings, labels), step["regularizer"], **EXACT)
    of_embeddings, _ = reference.gradients(total, embeddings, np.array(case["centers"]))
    assert_golden(of_embeddings, step["grad_embeddings_with_regularizer"], **EXACT)


def analytic_cases():
    for name, case in CASES.items():
        for number, step in enumerate(case["steps"]):
            plain = "focal_gamma" not in case and "num_subcenters" not in case["config"]
            if case["head"] in SLOPES and plain and step["grad_embeddings"] is not None:
                yield pytest.param(name, number, id=f"{name}, step {number + 1}")


@pytest.mark.parametrize(("name", "number"), list(analytic_cases()))
def test_analytic_gradients_equal_numerical_ones(name, number):
    case = CASES[name]
    step, _, logits, state, loss = steps_of(name)[number]
    embeddings, centers = np.array(step["embeddings"]), np.array(case["centers"])
    margin = case["config"].get("margin")

    got = reference.analytic_gradients(
        embeddings,
        centers,
        step["labels"],
        logits,
        state["scale"] if state else case["config"].get("scale", 64.0),
        lambda cosine: SLOPES[case["head"]](cosine, margin),
        case["config"].get("ignore_class"),
    )
    want = reference.gradients(loss, embeddings, centers)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-10, atol=1e-12)


def test_complex_steps_equal_central_differences():
    rng = np.random.default_rng(0)
    embeddings, centers = rng.normal(size=(3, 4)), rng.normal(size=(5, 4))
    labels = [4, 0, 2]

    def loss(x):
        return reference.softmax_loss(reference.arcface(x, centers, labels)[0], labels).mean()

    central = np.zeros((3, 4))
    for index in np.ndindex(3, 4):
        step = np.zeros((3, 4))
        step[index] = 1e-5
        central[index] = (loss(embeddings + step) - loss(embeddings - step)) / 2e-5
    np.testing.assert_allclose(
        reference.numerical_gradient(loss, embeddings), central, rtol=1e-6, atol=1e-7
    )


def test_analytic_gradient_of_zero_vectors_is_zero():
    embeddings, centers = np.eye(2, 4), np.eye(3, 4)
    embeddings[0] = centers[2] = 0.0
    labels = [0, 2]
    logits, _ = reference.normface(embeddings, centers, scale=2.0)
    of_embeddings, of_centers = reference.analytic_gradients(
        embeddings, centers, labels, logits, 2.0, lambda cosine: 1.0
    )
    np.testing.assert_array_equal(of_embeddings[0], np.zeros(4))
    np.testing.assert_array_equal(of_centers[2], np.zeros(4))
    assert np.isfinite(of_embeddings).all()
    assert np.isfinite(of_centers).all()


def test_arcface_slope_at_angle_0_is_the_mean_over_the_directions():
    assert reference.arcface_slope(1.0, 0.5) == 0.0


# Closed forms


@pytest.mark.parametrize(
    ("theta", "value"),
    [
        (1.0, np.cos(1.5)),
        (np.pi - 0.501, np.cos(np.pi - 0.001)),
        (np.pi - 0.499, np.cos(np.pi - 0.499) - 0.5 * np.sin(0.5)),
        (3.0, np.cos(3.0) - 0.5 * np.sin(0.5)),
    ],
)
def test_arcface_target_falls_back_beyond_pi(theta, value):
    assert reference.arcface_target(np.cos(theta), 0.5) == pytest.approx(value, rel=1e-12)


def test_psi_of_margin_4_falls_by_2_each_quarter_of_pi():
    thetas = np.linspace(0.0, np.pi, 5)
    psi = [reference.sphereface_target(np.cos(theta), 4) for theta in thetas]
    np.testing.assert_allclose(psi, [1, -1, -3, -5, -7], atol=1e-12)


@pytest.mark.parametrize(("call", "value"), [(1, 1000 / 1.12), (1658, 1000 / 199.96), (1659, 5.0)])
def test_sphereface_annealing_reaches_its_floor_at_call_1659(call, value):
    assert reference.annealing_weight(call, 1000.0, 0.12, 1.0, 5.0) == pytest.approx(value)


def test_adacos_scale_takes_the_median_of_the_target_angles():
    """Non-targets at a right angle give B = C - 1 = 2; the median of .1 .2 .4 .6 is .3."""
    cosine = np.zeros((4, 3))
    cosine[:, 1] = np.cos([0.6, 0.1, 0.4, 0.2])
    scale = reference.adacos_scale(cosine, [1, 1, 1, 1], scale=7.0)
    assert scale == pytest.approx(np.log(2.0) / np.cos(0.3), rel=1e-12)


@pytest.mark.parametrize(
    ("bounds", "value"), [({"min_scale": 3.0}, 3.0), ({"max_scale": 0.5}, 0.5)]
)
def test_adacos_scale_stays_within_its_bounds(bounds, value):
    cosine = np.zeros((1, 3))
    assert reference.adacos_scale(cosine, [1], scale=7.0, **bounds) == value


def test_adacos_scale_is_bounded_by_4_times_the_fixed_one():
    cosine = np.full((1, 10), 0.9)
    scale = 3.0
    for _ in range(20):
        scale = reference.adacos_scale(cosine, [1], scale)
    assert scale == pytest.approx(4 * np.sqrt(2) * np.log(9), rel=1e-12)


@pytest.mark.parametrize("name", reference.HEADS)
def test_ignored_rows_change_nothing_for_the_others(name):
    rng = np.random.default_rng(1)
    embeddings, centers = 20 * rng.normal(size=(5, 4)), rng.normal(size=(6, 4))
    labels = [3, -1, 0, 5, -1]
    head = reference.HEADS[name]

    logits, state = head(embeddings, centers, labels, ignore_class=-1)
    expected_logits, expected_state = head(embeddings[[0, 2, 3]], centers, [3, 0, 5])
    losses = reference.softmax_loss(logits, labels, ignore_class=-1)

    np.testing.assert_allclose(logits[[0, 2, 3]], expected_logits, rtol=1e-12)
    assert losses[1] == losses[4] == 0.0
    assert state == (expected_state and pytest.approx(expected_state, rel=1e-12))


@pytest.mark.parametrize("name", reference.HEADS)
def test_a_batch_of_ignored_rows_moves_no_state(name):
    rng = np.random.default_rng(2)
    embeddings, centers = rng.normal(size=(2, 4)), rng.normal(size=(6, 4))
    head = reference.HEADS[name]
    _, state = head(embeddings, centers, [2, 1])
    plain, _ = head(embeddings, centers, None, state)

    logits, after = head(embeddings, centers, [-1, -1], state, ignore_class=-1)

    assert after == state
    np.testing.assert_array_equal(logits, plain)
