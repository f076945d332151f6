"""The plain Keras models that an EmbeddingModel ships: its encoder and its classifier."""

import keras


class PlainModels:
    """Makes encoder and classifier once. Kept out of the model's attributes, so that Keras neither

    counts their layers twice nor saves them: they hold the backbone's and the head's own layers.
    """

    def __init__(self, model):
        self._model = model
        self._made = {}
        self._input_specs = None

    def remember(self, inputs):
        """Keeps shapes and dtypes of the first inputs: a subclassed backbone does not know them."""
        if self._input_specs is None:
            self._input_specs = keras.tree.map_structure(
                lambda tensor: keras.KerasTensor((None, *tensor.shape[1:]), dtype=tensor.dtype),
                inputs,
            )

    def forget(self):
        """They are made anew when they are asked for: the model has another head."""
        self._made = {}

    def get(self, kind):
        if kind not in self._made:
            inputs, embeddings = self._inputs_and_embeddings()
            if kind == "encoder":
                last = keras.layers.UnitNormalization(dtype="float32", name="unit_embedding")
            else:
                last = self._model.head
            self._made[kind] = keras.Model(inputs, last(embeddings), name=kind)
        return self._made[kind]

    def _inputs_and_embeddings(self):
        backbone = self._model.backbone
        graph = graph_of(backbone)
        if graph is not None:
            return graph
        if self._input_specs is None:
            raise ValueError(
                "The backbone's input shape is not known yet: call the model on a batch, or `fit` "
                f"it, first. Received: backbone={backbone.name!r} of class "
                f"{type(backbone).__name__}"
            )
        inputs = keras.tree.map_structure(
            lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), self._input_specs
        )
        return inputs, backbone(inputs)


def graph_of(backbone):
    """The symbolic inputs and embeddings of a functional or Sequential backbone, or None."""
    if isinstance(backbone, keras.Sequential):
        return (backbone.inputs[0], backbone.outputs[0]) if backbone.built else None
    if getattr(backbone, "inputs", None) is not None:
        return backbone.input, backbone.output  # as the user gave them: a tensor, a list, a dict
    return None


def input_names(model):
    """The names of a plain model's inputs, in the order of their flat list.

    Raises:
        ValueError: there are lists or dicts within the list or the dict.
    """
    inputs = model.input
    parts = list(inputs.values()) if isinstance(inputs, dict) else inputs
    if isinstance(parts, (list, tuple)) and not all(hasattr(part, "shape") for part in parts):
        raise ValueError(
            "A backbone to export must take one tensor, a list or a dict of tensors. Received: "
            f"inputs {keras.tree.map_structure(lambda part: tuple(part.shape), inputs)}"
        )
    if isinstance(inputs, dict):
        return sorted(inputs)  # as Keras flattens it
    if isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        return [part.name for part in inputs]
    return ["image"]


def named(encoder):
    """The encoder with names of its own inputs and output, which files for other runtimes keep."""
    inputs = [
        keras.Input(part.shape[1:], dtype=part.dtype, name=name)
        for name, part in zip(input_names(encoder), keras.tree.flatten(encoder.input), strict=True)
    ]
    packed = keras.tree.pack_sequence_as(encoder.input, inputs)
    model = keras.Model(packed, {"embedding": encoder(packed)}, name="encoder")
    model(packed)  # Keras exports what was called
    return model


def embeddings_shape_of(embeddings):
    shape = getattr(embeddings, "shape", None)
    if shape is None:
        raise ValueError(
            "The backbone must give one tensor of embeddings (batch, dim). "
            f"Received: {type(embeddings).__name__}"
        )
    return (None, *shape[1:])
