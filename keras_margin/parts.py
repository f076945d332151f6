"""What margin rules and scale policies share: each is part of one head."""

import weakref

import keras


class HeadPart(keras.layers.Layer):
    """A small Keras layer inside a head."""

    def __init__(self, **kwargs):
        # Cosines stay in the head's precision whatever the mixed-precision policy.
        super().__init__(autocast=False, **kwargs)
        self._owner = None

    def own(self, head):
        """Makes it part of `head`. It follows that head's counter, so it cannot serve another.

        Raises:
            ValueError: it is part of another head already.
        """
        owner = self._owner() if self._owner is not None else None
        if owner is not None and owner is not head:
            raise ValueError(
                f"This {type(self).__name__} belongs to the head {owner.name!r} already; make a "
                f"new one for each head. Received: {self.name!r} for the head {head.name!r}"
            )
        self._owner = weakref.ref(head)

    def get_build_config(self):
        return None  # the head builds it, after `attach`
