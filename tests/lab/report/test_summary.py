"""The format of summary.json, which other programs read."""

import json

from virtualgrad.lab.report import write_report


def test_format(make, saved, tmp_path):
    runs = [
        make("mlp", "svgd", 1, lowest=1.62, last=1.7, ms_per_step=0.3),
        make("mlp", "svgd", 0, lowest=1.61, last=1.61, ms_per_step=0.2),
        make("mlp", "svgd", 2, finished=False),
        make("resnet20", "sgd", 0, lowest=10.9, ms_per_step=None),
    ]
    write_report(saved(runs, tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "mlp": {
            "svgd": {
                "data": "MNIST",
                "seeds": [0, 1],
                "final": [1.61, 1.7],
                "lowest": [1.61, 1.62],
                "ms_per_step": 0.25,
            }
        },
        "resnet20": {
            "sgd": {
                "data": "CIFAR-10",
                "seeds": [0],
                "final": [10.9],
                "lowest": [10.9],
                "ms_per_step": None,
            }
        },
    }
