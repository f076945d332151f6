"""Warm-up requests: TF Serving sends them to itself before it says that a model is ready.

The file holds records of `PredictionLog`, whose message classes come in a package with a server's
dependencies. The few fields are written here by hand:

    PredictionLog.predict_log = 6    PredictLog.request = 1
    PredictRequest.model_spec = 1, inputs = 2 (map: key = 1, value = 2)
    ModelSpec.name = 1, signature_name = 3
"""

FILE = "assets.extra/tf_serving_warmup_requests"


def zeros(signature):
    """One row of zeros for each input, where its shape is known: {name: tensor} or None."""
    import tensorflow as tf

    if any(None in spec.shape[1:] for spec in signature.values()):
        return None
    return {
        name: tf.zeros((1, *spec.shape[1:]), tf.as_dtype(spec.dtype))
        for name, spec in signature.items()
    }


def write(folder, requests):
    """Writes a request for each signature into a SavedModel.

    Args:
        folder: pathlib.Path of the SavedModel.
        requests: {signature: {input: tensor}}; None in place of the inputs: no request.
    """
    import tensorflow as tf

    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for signature, inputs in requests.items():
            if inputs is not None:
                writer.write(_prediction_log(signature, inputs))


def _prediction_log(signature, inputs):
    import tensorflow as tf

    model_spec = _field(1, b"model") + _field(3, signature.encode())
    request = _field(1, model_spec)
    for name, tensor in inputs.items():
        value = tf.make_tensor_proto(tensor).SerializeToString()
        request += _field(2, _field(1, name.encode()) + _field(2, value))
    return _field(6, _field(1, request))


def _field(number, content):
    """A field of bytes in the wire format of protocol buffers."""
    length, left = b"", len(content)
    while left > 127:
        length += bytes([left % 128 + 128])
        left //= 128
    return bytes([number * 8 + 2]) + length + bytes([left]) + content
