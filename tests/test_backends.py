"""TensorFlow and JAX: models that both train alike and hand over, and JAX without TensorFlow."""

from typing import NamedTuple

import exchange
import numpy as np
import pytest
from jax_process import on_jax


def assert_close(got, want):
    for name in want["evaluation"]:
        assert got["evaluation"][name] == pytest.approx(want["evaluation"][name], rel=1e-5)
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-5)
    np.testing.assert_allclose(got["embeddings"], want["embeddings"], rtol=1e-5, atol=1e-5)


class Found(NamedTuple):
    tensorflow: dict  # what `exchange.train_and_save` gives
    jax: dict
    tensorflow_file_on_jax: dict  # what `exchange.load_and_go_on` gives
    jax_file_on_tensorflow: dict


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    of_tensorflow = exchange.train_and_save(folder)
    code = """
        import json
        import exchange
        given = exchange.load_and_go_on(".", "tensorflow")
        print(json.dumps([exchange.train_and_save("."), given]))
    """
    of_jax, of_file = on_jax(code, None, folder)
    jax_file = exchange.load_and_go_on(folder, "jax")
    return Found(of_tensorflow, of_jax, of_file, jax_file)


every_head = pytest.mark.parametrize("name", exchange.HEADS)


@pytest.mark.long  # a minute of compiling, on either backend
@every_head
def test_training_has_the_same_losses(found, name):
    (on_jax, later_on_jax), (first, later) = found.jax[name], found.tensorflow[name]
    np.testing.assert_allclose(on_jax, first, rtol=1e-5)
    assert_close(later_on_jax, later)
    assert abs(later["losses"][-1] - first[0]) > 0.1  # it does train


@pytest.mark.long
@every_head
def test_tensorflow_file_goes_on_on_jax(found, name):
    assert_close(found.tensorflow_file_on_jax[name], found.tensorflow[name][1])


@pytest.mark.long
@every_head
def test_jax_file_goes_on_on_tensorflow(found, name):
    assert_close(found.jax_file_on_tensorflow[name], found.jax[name][1])


def test_jax_without_tensorflow(tmp_path):
    """An import of TensorFlow fails there, and nothing needs one."""
    code = """
        import json, sys
        sys.modules["tensorflow"] = None
        import exchange, keras, numpy as np
        from keras_margin import retrieval, verification

        x, y = exchange.data()
        found = {}
        for name in ("AdaCos", "ArcFace, sample"):
            model = exchange.new_model(name)
            exchange.two_epochs(model)
            model.save("model.keras")
            model.encoder.save("encoder.keras")
            again = keras.saving.load_model("model.keras")
            encoder = keras.saving.load_model("encoder.keras")
            embeddings = again.encoder.predict(x, verbose=0)
            scores, genuine = verification.all_pairs(embeddings, y)
            found[name] = {
                "units": [
                    each.predict(x, verbose=0).tolist()
                    for each in (model.encoder, again.encoder, encoder)
                ],
                "evaluations": [
                    each.evaluate(x, y, verbose=0, return_dict=True) for each in (model, again)
                ],
                "verification": verification.evaluate(embeddings, y, far=[0.1]),
                "tar": verification.tar_at_far(scores, genuine, 0.1),
                "threshold": verification.threshold_at_far(scores, genuine, 0.1),
                "eer": verification.equal_error_rate(scores, genuine),
                "recall": retrieval.recall_at_k(embeddings, y, 1),
            }
        print(json.dumps(found, default=float))
    """
    found = on_jax(code, None, tmp_path)
    assert len(found) == 2
    for got in found.values():
        kept, loaded, encoder = got["units"]
        np.testing.assert_allclose(np.linalg.norm(kept, axis=1), 1.0, rtol=1e-6)
        np.testing.assert_allclose(loaded, kept, atol=1e-6)
        np.testing.assert_allclose(encoder, kept, atol=1e-6)
        assert got["evaluations"][0] == pytest.approx(got["evaluations"][1], rel=1e-6)
        assert -1.0 < got["threshold"] < 1.0
        want = {"eer": got["eer"], "tar@far=0.1": got["tar"], "rank1": got["recall"]}
        assert want.items() <= got["verification"].items()
