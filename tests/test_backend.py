"""What is said where Keras runs on a backend that heads cannot be trained on."""

import subprocess
import sys

import pytest

CODE = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import keras_margin
print(*(each.message for each in seen))
for make in (lambda: keras_margin.ArcFace(3), keras_margin.SemiHardTriplet):
    try:
        make()
    except RuntimeError as error:
        print(error)
print(keras_margin.verification.equal_error_rate([0.9, 0.8, 0.1], [True, False, False]))
"""


@pytest.mark.parametrize("backend", ["numpy"])
def test_another_backend_is_named_at_import(backend):
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={"KERAS_BACKEND": backend, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    warning, *errors, rate = done.stdout.splitlines()
    assert f"Keras runs on the {backend} backend. There keras_margin has `verification`" in warning
    assert "KERAS_BACKEND=tensorflow or jax" in warning
    assert len(errors) == 2
    for error in errors:
        assert f"Received: backend='{backend}'" in error
    assert "0.0" in rate
