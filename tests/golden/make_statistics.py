"""Makes statistics.json: what rliable and statsmodels compute on fixed inputs, for tests/analysis/test_stats.py.

rliable 1.2.0 needs pandas below 3 and arch below 8, so this runs in an environment of its own:

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install 'pandas<3' rliable==1.2.0 'arch<8' statsmodels
    /tmp/oracle/bin/python tests/golden/make_statistics.py

Nothing of grpo_lab is imported. The file is made once; the tests only read it.
"""

from __future__ import annotations

import json
import math
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from rliable import metrics
from rliable.library import create_performance_profile
from statsmodels.formula.api import ols
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower, TTestPower

RNG = np.random.default_rng(20241121)
THRESHOLDS = [-0.1, 0.0, 0.25, 0.5, 0.6, 0.75, 1.0]


def runs_and_tasks(treated: tuple[int, int], control: tuple[int, int]) -> dict:
    """Scores in steps of .05, so that some are equal."""
    x, y = (np.round(RNG.random(shape) * 20) / 20 for shape in (treated, control))
    # The runs alone are resampled for the band, which is not kept: it is drawn from numpy's global generator.
    profile, _ = create_performance_profile({"x": x}, np.array(THRESHOLDS), reps=2)
    return {
        "treated": x.tolist(),
        "control": y.tolist(),
        "iqm": metrics.aggregate_iqm(x),
        "probability_of_improvement": metrics.probability_of_improvement(x, y),
        "thresholds": THRESHOLDS,
        "profile": profile["x"].tolist(),
    }


def clustered(sizes: list[int]) -> dict:
    """A regression on a constant whose errors are clustered, with and without the small-sample factor."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    values = np.round(0.5 + 0.2 * RNG.standard_normal(len(sizes))[labels] + 0.2 * RNG.standard_normal(len(labels)), 3)
    order = RNG.permutation(len(labels))
    values, labels = values[order], labels[order]
    model = sm.OLS(values, np.ones(len(values)))
    robust = {
        name: model.fit(cov_type="cluster", cov_kwds={"groups": labels, "use_correction": corrected}).bse[0]
        for name, corrected in (("robust", False), ("robust_corrected", True))
    }
    return {"values": values.tolist(), "clusters": labels.tolist(), "standard_error": model.fit().bse[0], **robust}


def crossed(seeds: int, questions: int) -> dict:
    """Mean squares of seeds, questions and the rest, by an analysis of variance."""
    table = 0.1 * RNG.standard_normal((seeds, 1)) + 0.3 * RNG.standard_normal(questions)
    table = np.round(table + 0.2 * RNG.standard_normal((seeds, questions)), 3)
    rows = [(s, q, table[s, q]) for s in range(seeds) for q in range(questions)]
    fit = ols("x ~ C(s) + C(q)", pd.DataFrame(rows, columns=["s", "q", "x"])).fit()
    anova = sm.stats.anova_lm(fit)
    return {"values": table.tolist(), "mean_squares": (anova["sum_sq"] / anova["df"]).tolist()}


def power() -> list[dict]:
    """Chances for effects in units of the deviation, where statsmodels has a number and not NaN."""
    cases = []
    for paired, test in ((True, TTestPower()), (False, TTestIndPower())):
        for effect in (0.2, 0.5, 1.0, 2.0):
            for n in (2, 3, 5, 10, 30):
                for alpha in (0.05, 0.01):
                    chance = float(test.power(effect, n, alpha))
                    if not math.isnan(chance):
                        cases.append({"paired": paired, "effect": effect, "n": n, "alpha": alpha, "power": chance})
    return cases


def sizes() -> list[dict]:
    """Sizes for 80% power; only effects for which solve_power does not fail."""
    cases = []
    for paired, test in ((True, TTestPower()), (False, TTestIndPower())):
        for effect in (0.1, 0.25, 0.5, 0.8, 1.0):
            found = test.solve_power(effect, power=0.8, alpha=0.05)
            cases.append({"paired": paired, "effect": effect, "n": float(np.squeeze(found))})
    return cases


def detectable() -> list[dict]:
    """Effects in units of the deviation that n seeds find with 80% power."""
    cases = []
    for paired, test, size in ((True, TTestPower(), "nobs"), (False, TTestIndPower(), "nobs1")):
        for n in (3, 5, 10):
            found = test.solve_power(effect_size=None, power=0.8, alpha=0.05, **{size: n})
            cases.append({"paired": paired, "n": n, "effect": float(np.squeeze(found))})
    return cases


def adjusted(p_values: list[float]) -> dict:
    holm, bh = (multipletests(p_values, method=method)[1].tolist() for method in ("holm", "fdr_bh"))
    return {"p": p_values, "holm": holm, "benjamini_hochberg": bh}


def main() -> None:
    made_with = {name: version(name) for name in ("rliable", "arch", "statsmodels", "scipy", "numpy", "pandas")}
    golden = {
        "made_with": {"script": "make_statistics.py", "python": platform.python_version(), **made_with},
        "rliable": [
            runs_and_tasks((5, 4), (6, 4)),
            runs_and_tasks((3, 1), (3, 1)),
            runs_and_tasks((10, 5), (3, 5)),
            runs_and_tasks((7, 3), (7, 3)),
        ],
        "clustered": [clustered([4] * 8), clustered([1, 2, 3, 5, 8, 13, 2, 1])],
        "crossed": [crossed(3, 20), crossed(5, 12)],
        "power": power(),
        "sizes": sizes(),
        "detectable": detectable(),
        "adjusted": [
            adjusted([0.04, 0.001, 0.03, 0.02]),
            adjusted([0.01, 0.01, 0.5, 1.0, 0.0, 0.049, 0.2]),
            adjusted(np.round(RNG.random(12) ** 3, 6).tolist()),
            adjusted([0.3]),
        ],
    }
    Path(__file__).with_name("statistics.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
