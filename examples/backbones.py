"""A small convolutional network: raw pixels in, embedding out."""

import keras
from keras import layers

SMALLEST_IMAGE = 8  # three times halved


def small_cnn(image_shape, embedding_dim=64, dropout=0.3):
    """About 170 000 weights, trained in minutes on a laptop. Real face sets want a ResNet-50.

    Args:
        image_shape: (height, width, channels) of images with pixels 0 to 255: the scaling is part
            of the network, so whoever loads the encoder cannot forget it.
        embedding_dim: length of the embedding.
        dropout: share of the features that a training step leaves out.

    Returns:
        A functional model: (batch, height, width, channels) -> (batch, embedding_dim).
    """
    image = keras.Input(image_shape, name="image")
    x = layers.Rescaling(1.0 / 255.0)(image)
    while min(x.shape[1:3]) > 40:  # large pictures: to about 28 x 28 first
        x = layers.AveragePooling2D(2)(x)
    # momentum: Keras' 0.99 would still remember the first variance after a few hundred steps.
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.ReLU()(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    x = layers.Dropout(dropout)(x)
    # No activation at the end: after a ReLU all cosines would be positive.
    embedding = layers.Dense(embedding_dim, use_bias=False)(x)
    embedding = layers.BatchNormalization(momentum=0.9, scale=False, name="embedding")(embedding)
    return keras.Model(image, embedding, name="small_cnn")
