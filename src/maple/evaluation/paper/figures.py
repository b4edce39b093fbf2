"""The figures of the paper (Venkataramanan et al., ICCV Workshops 2023), table by table, for comparison with ours.

Columns have the names that the suites use (:mod:`maple.evaluation.paper.suites`). Accuracies are shares. Where a
cell holds two
accuracies, of the softmax and of the nearest cluster, the second one is ``md_accuracy``.
"""

from __future__ import annotations

Table = dict[str, dict[str, float]]  # row, column, figure


def _table(columns: str, rows: dict[str, tuple[float | None, ...]]) -> Table:
    names = columns.split()
    return {
        row: {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for row, values in rows.items()
    }


CIFAR10 = _table(
    "accuracy ece nll auroc/svhn auroc/cifar100 aupr/svhn aupr/cifar100 latency_ms",
    {
        "Deterministic": (0.950, 0.094, 0.138, 0.801, 0.765, 0.794, 0.762, 4.01),
        "MC Dropout": (0.960, 0.048, 0.293, 0.932, 0.835, 0.965, 0.829, 27.10),
        "Deep Ensemble": (0.964, 0.014, 0.134, 0.934, 0.864, 0.935, 0.885, 38.10),
        "DUQ": (0.945, 0.023, 0.222, 0.927, 0.872, 0.973, 0.833, 8.68),
        "SNGP": (0.957, 0.016, 0.153, 0.991, 0.911, 0.994, 0.907, 6.25),
        "DUE": (0.956, 0.015, 0.179, 0.936, 0.852, 0.967, 0.850, 6.94),
        "VMDLS": (0.951, None, None, 0.932, 0.868, 0.953, 0.864, 5.61),
        "MAPLE": (0.954, 0.012, 0.142, 0.996, 0.926, 0.997, 0.918, 4.96),
    },
)

CIFAR100 = _table(
    "accuracy corrupted/accuracy ece corrupted/ece nll corrupted/nll "
    "auroc/cifar10 auroc/tiny_imagenet aupr/cifar10 aupr/tiny_imagenet",
    {
        "Deterministic": (0.790, 0.522, 0.108, 0.279, 1.342, 2.834, 0.697, 0.748, 0.713, 0.747),
        "MC Dropout": (0.794, 0.463, 0.115, 0.293, 0.986, 2.868, 0.786, 0.787, 0.781, 0.790),
        "Deep Ensemble": (0.796, 0.540, 0.029, 0.254, 0.706, 2.893, 0.798, 0.811, 0.792, 0.801),
        "DUQ": (0.776, 0.505, 0.112, 0.277, 1.303, 2.811, 0.740, 0.759, 0.747, 0.761),
        "SNGP": (0.787, 0.505, 0.129, 0.286, 1.080, 2.676, 0.743, 0.783, 0.749, 0.765),
        "DUE": (0.778, 0.493, 0.134, 0.305, 1.454, 2.756, 0.732, 0.754, 0.734, 0.768),
        "MAPLE": (0.786, 0.540, 0.065, 0.245, 1.112, 2.715, 0.793, 0.828, 0.799, 0.817),
    },
)

IMAGENET = _table(
    "accuracy ece nll auroc/imagenet_o aupr/imagenet_o latency_ms",
    {
        "Deterministic": (0.757, 0.058, 0.925, 0.553, 0.546, 42.64),
        "MC Dropout": (0.753, 0.032, 0.922, 0.614, 0.609, 93.74),
        "Deep Ensemble": (0.764, 0.024, 0.930, 0.625, 0.616, 130.78),
        "MAPLE": (0.752, 0.021, 0.928, 0.637, 0.635, 55.26),
    },
)

MD = _table(
    "auroc/cifar100",
    {"Lee et al.": (0.893,), "Marginal MD": (0.838,), "RMD": (0.897,), "MAPLE": (0.926,)},
)

ABLATION = _table(
    "softmax_accuracy accuracy ece auroc/svhn aupr/svhn auroc/cifar100 aupr/cifar100 components",
    {
        "DNN+MD": (0.950, 0.943, 0.086, 0.752, 0.762, 0.583, 0.564, None),
        "DNN+PCA+MD": (0.950, 0.946, 0.053, 0.855, 0.839, 0.813, 0.859, 12),
        "DNN+PCA+ED": (0.950, 0.943, 0.105, 0.829, 0.804, 0.734, 0.765, 12),
        "DNN+Triplet+PCA+MD": (0.954, 0.953, 0.013, 0.945, 0.948, 0.912, 0.894, 11),
        "DNN+Clustering+PCA+MD": (0.947, 0.945, 0.032, 0.922, 0.908, 0.811, 0.815, 12),
        "MAPLE": (0.956, 0.954, 0.012, 0.996, 0.997, 0.926, 0.930, 12),
    },
)

_CLUSTERED = "clusters accuracy ece auroc/svhn auroc/cifar100"

FNR = _table(
    _CLUSTERED,
    {
        "t = 0": (23, 0.9449, 0.014, 0.922, 0.888),
        "t = 0.1": (18, 0.9534, 0.013, 0.964, 0.918),
        "t = 0.2": (14, 0.9544, 0.012, 0.991, 0.925),
        "t = 0.3": (12, 0.9541, 0.012, 0.996, 0.926),
        "t = 0.4": (10, 0.9535, 0.013, 0.961, 0.921),
        "t = 0.5": (10, 0.9535, 0.012, 0.955, 0.915),
    },
)

MAX_CLUSTERS = _table(
    _CLUSTERED,
    {
        "at most 3, t = 0.1": (14, 0.9542, 0.012, 0.996, 0.925),
        "at most 3, t = 0.3": (10, 0.9540, 0.014, 0.972, 0.919),
        "at most 3, t = 0.5": (10, 0.9533, 0.012, 0.958, 0.917),
        "at most 5, t = 0.1": (18, 0.9534, 0.013, 0.964, 0.918),
        "at most 5, t = 0.3": (12, 0.9541, 0.012, 0.996, 0.926),
        "at most 5, t = 0.5": (10, 0.9535, 0.012, 0.955, 0.915),
        "at most 7, t = 0.1": (18, 0.9537, 0.013, 0.959, 0.894),
        "at most 7, t = 0.3": (13, 0.9545, 0.012, 0.992, 0.921),
        "at most 7, t = 0.5": (10, 0.9531, 0.013, 0.944, 0.911),
        "at most 10, t = 0.1": (26, 0.9519, 0.014, 0.909, 0.863),
        "at most 10, t = 0.3": (22, 0.9521, 0.013, 0.918, 0.886),
        "at most 10, t = 0.5": (11, 0.9534, 0.012, 0.952, 0.908),
    },
)

FREQUENCY = _table(
    _CLUSTERED,
    {
        "p = 5": (16, 0.895, 0.025, 0.914, 0.876),
        "p = 10": (12, 0.954, 0.012, 0.996, 0.926),
        "p = 15": (12, 0.955, 0.012, 0.987, 0.922),
        "p = 20": (10, 0.953, 0.013, 0.968, 0.917),
    },
)

BACKBONES = _table(
    "accuracy ece auroc/svhn auroc/cifar100",
    {
        "WRN-28-10": (0.954, 0.012, 0.996, 0.926),
        "ResNet-18": (0.945, 0.029, 0.979, 0.886),
        "EfficientNet-B0": (0.902, 0.035, 0.942, 0.893),
    },
)

CLUSTERING = _table(
    _CLUSTERED,
    {
        "K-Means": (30, 0.952, 0.154, 0.871, 0.850),
        "G-Means": (67, 0.910, 0.266, 0.710, 0.627),
        "X-Means": (12, 0.954, 0.012, 0.996, 0.926),
    },
)

CONFIDENCE = _table(
    "accuracy@0.5 accuracy@0.8 accuracy@0.9",
    {
        "MC Dropout": (0.962, 0.976, 0.988),
        "Deep Ensemble": (0.967, 0.987, 0.995),
        "DUQ": (0.950, 0.977, 0.982),
        "SNGP": (0.959, 0.978, 0.985),
        "DUE": (0.962, 0.974, 0.979),
        "MAPLE": (0.958, 0.989, 0.995),
    },
)

GAUSSIAN = _table("gaussian_error", {"Deterministic": (3.540,), "MAPLE": (1.395,)})  # CIFAR-10

MICROORGANISMS = _table(
    "accuracy ece auroc/unknown aupr/unknown latency_ms",
    {
        "MC Dropout": (0.936, 0.039, 0.548, 0.589, 129.7),
        "Deep Ensemble": (0.969, 0.025, 0.589, 0.570, 146.81),
        "SNGP": (0.954, 0.196, 0.798, 0.826, 26.25),
        "MAPLE": (0.963, 0.036, 0.864, 0.865, 17.38),
    },
)
