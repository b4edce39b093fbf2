"""The chi-square tail of the exported graph against SciPy, far beyond the distances that images have."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import erfc
from scipy.stats import chi2

torch = pytest.importorskip("torch")

from maple.deploy.graph._constants import SMALLEST  # noqa: E402
from maple.deploy.graph.distances import Tail, erfc_terms, tail_terms  # noqa: E402

DISTANCES = np.concatenate([[SMALLEST], np.geomspace(1e-12, 1e6, 3000)])


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 12, 23, 83, 84, 301, 640, 1281])
def test_the_tail_is_scipys(degrees):
    around = np.linspace(0.2, 3, 500) * degrees  # where it falls from 1 to 0
    squared = np.sort(np.concatenate([DISTANCES, around]))
    tail = Tail(degrees)(torch.from_numpy(squared)[:, None]).numpy()
    np.testing.assert_allclose(tail, chi2.sf(squared, degrees), rtol=0, atol=1e-9 if degrees % 2 else 1e-11)
    assert tail.min() >= 0 and tail.max() <= 1
    assert (np.diff(tail) <= 1e-9).all()


def test_erfc_is_a_sum_of_exponentials():
    rates, weights = erfc_terms()
    z = np.concatenate([[0.0], np.geomspace(1e-30, 700, 5000)])
    np.testing.assert_allclose(np.exp(-np.outer(z, rates)) @ weights, erfc(np.sqrt(z)), rtol=0, atol=1e-9)
    assert (weights > 0).all() and (rates >= 1).all()


def test_no_term_exceeds_one():
    """So that nothing overflows or cancels, whatever the distance."""
    for degrees in (2, 83, 1280):
        powers, rates, logs = tail_terms(degrees)
        terms = powers * np.log(DISTANCES)[:, None] - rates * DISTANCES[:, None] + logs
        assert np.isfinite(terms).all() and terms.max() <= 1e-9


@pytest.mark.parametrize("degrees", [7, 84])
def test_the_tail_in_onnxruntime(degrees):
    """Which has neither an incomplete gamma function nor erf in float64."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    import io

    import onnxruntime

    file = io.BytesIO()
    with pytest.warns(DeprecationWarning):
        torch.onnx.export(
            Tail(degrees),
            (torch.ones(2, 1, dtype=torch.float64),),
            file,
            dynamo=False,
            input_names=["d2"],
            dynamic_axes={"d2": {0: "n"}},
            opset_version=18,
        )
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (tail,) = session.run(None, {"d2": DISTANCES[:, None]})
    np.testing.assert_allclose(tail, chi2.sf(DISTANCES, degrees), rtol=0, atol=1e-9)
