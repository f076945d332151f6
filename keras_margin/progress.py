"""Keras' progress bar over several passes of an evaluation."""

import keras


class Progress:
    """One bar over the rows of several passes.

    Args:
        passes: how often all rows will be gone through, at most.
        rows: of a pass.
        verbose: 0 shows nothing, 1 a bar, 2 a line at the end, as in Keras.

    Called with slices of rows, it gives them on and moves the bar.
    """

    def __init__(self, passes, rows, verbose):
        self._bar = None
        if verbose and rows:
            self._bar = keras.utils.Progbar(passes * rows, unit_name="row", verbose=verbose)

    def __call__(self, blocks):
        for rows in blocks:
            yield rows
            if self._bar is not None:
                self._bar.add(rows.stop - rows.start)

    def end(self):
        """Fills the bar: a pass may have had nothing to do."""
        if self._bar is not None and self._bar._seen_so_far < self._bar.target:
            self._bar.update(self._bar.target)
