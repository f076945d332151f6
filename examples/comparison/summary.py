"""What runs say together: mean and spread over seeds, and the differences that are no chance."""

import math

import numpy as np
from scipy import stats

from .training import RAW_PIXELS, Setting

JUDGED = ("open", "closed")
MEASURES = ("eer", "tar", "rank1", "recall1")
LEVEL = 0.05
FEWEST_SEEDS = 3


class Summary:
    """The results of settings and seeds.

    Args:
        results: {setting: [result of `training.run`, one a seed]}, the seeds in the same order.
    """

    def __init__(self, results):
        self.results = results
        self.seeds = len(next(iter(results.values())))

    def seeds_in_words(self):
        return "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"

    def values(self, setting, *keys):
        """A number of each seed, float64 (seeds,); NaN for a run that failed or has no such."""
        found = []
        for result in self.results[setting]:
            for key in keys:
                result = None if result is None else result.get(key)
            found.append(math.nan if result is None else result)
        return np.array(found, float)

    def count(self, setting):
        """Runs that did not fail."""
        return int(np.isfinite(self.values(setting, "open", "eer")).sum())

    def failures(self):
        """{setting: message of its first failed run}."""
        found = {}
        for setting, results in self.results.items():
            messages = [result["failed"] for result in results if "failed" in result]
            found.update({setting: messages[0]} if messages else {})
        return found

    def mean_std(self, setting, *keys):
        """Mean and sample standard deviation over the seeds; NaN of none, and of a single one."""
        values = self.values(setting, *keys)
        values = values[np.isfinite(values)]
        mean = float(np.mean(values)) if len(values) else math.nan
        return mean, float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

    def best_first(self):
        """The settings by open-set EER; what has none comes last."""
        means = {setting: self.mean_std(setting, "open", "eer")[0] for setting in self.results}
        return sorted(means, key=lambda setting: np.nan_to_num(means[setting], nan=math.inf))

    def differences(self, pairs, *keys):
        """Paired differences, seed by seed, of those pairs that chance does not explain.

        A paired t-test each, Holm's correction over all the pairs: the chance that one of them is
        named without a reason is at most 5 %.

        Args:
            pairs: list of (setting, reference).
            *keys: of the number that is compared, as of `values`.

        Returns:
            {pair: mean of setting - reference} of the pairs that differ.
        """
        tests = {}
        for pair in pairs:
            a, b = (self.values(setting, *keys) for setting in pair)
            difference = (a - b)[np.isfinite(a - b)]
            if len(difference) >= FEWEST_SEEDS:
                tests[pair] = float(np.mean(difference)), _p_value(difference)
        named = {}
        for place, pair in enumerate(sorted(tests, key=lambda pair: tests[pair][1])):
            mean, p = tests[pair]
            if p * (len(tests) - place) > LEVEL:
                break
            named[pair] = mean
        return named

    def findings(self, far):
        """Sentences: who differs, in the open set, by more than the seeds do."""
        if self.seeds < FEWEST_SEEDS:
            return [
                f"With {self.seeds_in_words()} no difference is claimed: give --seeds "
                f"{FEWEST_SEEDS} or more."
            ]
        trained = [setting for setting in self.best_first() if setting != RAW_PIXELS]
        matched = [setting for setting in trained if setting.matched]
        softmax = Setting("SoftmaxHead")
        families = {
            "raw pixels": [(setting, RAW_PIXELS) for setting in trained],
            str(softmax): [(setting, softmax) for setting in trained if setting != softmax],
            "the same head at its own scale": [
                (setting, Setting(setting.head)) for setting in matched
            ],
        }
        if softmax not in self.results:
            del families[str(softmax)]
        lines = []
        for key, title in (("eer", "EER"), ("tar", tar_name(far))):
            for reference, pairs in families.items():
                if pairs:
                    named = self.differences(pairs, "open", key)
                    lines.append(f"Open-set {title} against {reference}: {_said(pairs, named)}")
        return lines


def tar_name(far):
    return f"TAR@FAR={100 * far:g}%"


def _p_value(difference):
    """Two-sided, of the t-test that the mean difference is 0."""
    error = np.std(difference, ddof=1) / math.sqrt(len(difference))
    mean = abs(np.mean(difference))
    if error <= 1e-12 * mean:  # every seed says the same
        return 0.0 if mean else 1.0
    return 2.0 * float(stats.t.sf(mean / error, len(difference) - 1))


def _said(pairs, named):
    parts = []
    for word, sign in (("lower", -1), ("higher", 1)):
        found = [pair for pair in pairs if pair in named and named[pair] * sign > 0]
        if found:
            names = ", ".join(f"{setting} {named[setting, by]:+.3f}" for setting, by in found)
            parts.append(f"{word}: {names}.")
    others = len(pairs) - len(named)
    if others:
        whom = f"the other {others}" if named else f"any of {others}"
        parts.append(f"no difference shown for {whom}.")
    return " ".join(parts)
