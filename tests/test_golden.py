"""The heads against the recorded values of golden_values/, in float32 and in float64."""

import keras
import numpy as np
import pytest
import reference
from backends import DTYPES, gradients

import keras_margin as km

FILES = sorted(path.stem for path in reference.GOLDEN_VALUES.glob("*.json"))
CASES = {f"{file}: {case['name']}": case for file in FILES for case in reference.golden_cases(file)}
# The files' words for the annealing of SphereFace and LSoftmax.
ANNEALING = {
    "base": "lambda_base",
    "gamma": "lambda_gamma",
    "power": "lambda_power",
    "floor": "lambda_min",
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def head_of(case, dtype):
    config = dict(case["config"])
    if "margin_rule" in case:
        rule = getattr(km.margins, case["margin_rule"]["class"])
        config["margin"] = rule(**case["margin_rule"]["config"])
    if "focal_gamma" in case:
        config["focal_gamma"] = case["focal_gamma"]
    for name, value in case.get("annealing", {}).items():
        config[ANNEALING[name]] = value
    head = getattr(km, case["head"])(**config, dtype=dtype)
    centers = np.array(case["centers"], dtype)
    head.build((None, centers.shape[1]))
    head.centers.assign(centers)
    head.steps.assign(case.get("start_iteration", 0))
    return head


def steps_of(case, dtype):
    """(recorded step, embeddings, labels) of each training call."""
    for step in case["steps"]:
        embeddings = keras.ops.convert_to_tensor(step["embeddings"], dtype=dtype)
        yield step, embeddings, np.array(step["labels"], "int32")


def assert_values(got, want, case, dtype):
    atol = case.get("atol", 1e-4)
    tolerance = {"rtol": 1e-4, "atol": atol} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-9}
    reference.assert_golden(keras.ops.convert_to_numpy(got), want, **tolerance)


def assert_gradient(got, want, dtype):
    largest = 0.0 if want is None else np.abs(want).max()
    tolerance = {"rtol": 1e-4, "atol": 2e-4 * largest}
    if dtype == "float64":
        tolerance = {"rtol": 1e-9, "atol": 1e-9}
    reference.assert_golden(keras.ops.convert_to_numpy(got), want, **tolerance)


def assert_state(head, step, case, dtype):
    in_force = {
        "scale": lambda: head.current_scale,
        "t": lambda: head.t,
        "mu": lambda: head.margin_rule.mu,
        "sigma": lambda: head.margin_rule.sigma,
        "iteration": lambda: head.steps,
        # The file has the lambda of the call that was made, the rule that of the next one.
        "lambda": lambda: lambda_of_call(head, dtype),
    }
    for name, want in step.get("state", {}).items():
        assert_values([in_force[name]()], [want], case, dtype)


def lambda_of_call(head, dtype):
    head.steps.assign(head.steps - 1)
    annealing = head.margin_rule.annealing(dtype)
    head.steps.assign(head.steps + 1)
    return annealing


def state_of(head):
    return [np.array(variable) for variable in head.non_trainable_variables]


def assert_gradients(head, losses_of, embeddings, step, dtype, name="grad_embeddings"):
    """The gradients of sum(losses) / batch are as recorded."""

    def mean_of(embeddings):
        return keras.ops.sum(losses_of(embeddings)) / len(embeddings)

    of_embeddings, of_centers = gradients(
        mean_of, [embeddings], [head.centers], head.non_trainable_variables
    )
    assert_gradient(of_embeddings, step[name], dtype)
    assert_gradient(of_centers, step["grad_centers"], dtype)


@every_dtype
@every_case
def test_plain_logits(case, dtype):
    embeddings = np.array(case["steps"][0]["embeddings"], dtype)
    logits = head_of(case, dtype)(embeddings)
    assert keras.backend.standardize_dtype(logits.dtype) == dtype
    assert_values(logits, case["plain_logits"], case, dtype)


@pytest.mark.filterwarnings("ignore:.*Only `head.loss`")  # the logits have no focal factor
@every_dtype
@every_case
def test_logits_with_margin(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):
        logits = head(embeddings, labels)
        assert keras.backend.standardize_dtype(logits.dtype) == dtype
        assert_values(logits, step["logits"], case, dtype)
        assert_state(head, step, case, dtype)


@every_dtype
@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if "focal_gamma" not in case],
    ids=[name for name, case in CASES.items() if "focal_gamma" not in case],
)
def test_gradients_of_cross_entropy_of_the_logits(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):
        counted = np.flatnonzero(labels != head.ignore_class)

        def losses_of(embeddings, labels=labels, counted=counted):
            logits = keras.ops.take(head(embeddings, labels), counted, axis=0)
            return keras.ops.sparse_categorical_crossentropy(
                labels[counted], logits, from_logits=True
            )

        assert_gradients(head, losses_of, embeddings, step, dtype)


@every_dtype
@every_case
def test_loss(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):
        losses = head.loss(embeddings, labels)
        assert keras.backend.standardize_dtype(losses.dtype) == dtype
        want = step["loss"]
        if "regularizer" in step:
            want = np.add(want, step["regularizer"]).tolist()
        assert_values(losses, want, case, dtype)
        assert_state(head, step, case, dtype)


@every_dtype
@every_case
def test_gradients_of_loss(case, dtype):
    head = head_of(case, dtype)
    for step, embeddings, labels in steps_of(case, dtype):

        def losses_of(embeddings, labels=labels):
            return head.loss(embeddings, labels)

        with_regularizer = "grad_embeddings_with_regularizer"
        name = with_regularizer if with_regularizer in step else "grad_embeddings"
        assert_gradients(head, losses_of, embeddings, step, dtype, name)


@every_dtype
@every_case
def test_evaluation_is_plain_and_moves_no_state(case, dtype):
    head = head_of(case, dtype)
    for _, embeddings, labels in steps_of(case, dtype):
        head.loss(embeddings, labels)
    before = state_of(head)

    plain = keras.ops.convert_to_numpy(head(embeddings))
    logits = keras.ops.convert_to_numpy(head(embeddings, labels, training=False))
    losses = head.loss(embeddings, labels, training=False)

    counted = labels != head.ignore_class
    assert_values(logits[counted], plain[counted], case, dtype)
    want = reference.softmax_loss(plain.astype("float64"), labels, head.ignore_class)
    assert_values(losses, want, case, dtype)
    for variable, value in zip(state_of(head), before, strict=True):
        np.testing.assert_array_equal(variable, value)
