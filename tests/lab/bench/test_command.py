"""`virtualgrad bench` as a user meets it."""

import json

import pytest
import torch
from typer.testing import CliRunner

from virtualgrad.lab.bench import command, measure
from virtualgrad.lab.bench.methods import METHODS
from virtualgrad.lab.bench.modes import MODES, PRECISIONS
from virtualgrad.lab.bench.networks import NETWORKS
from virtualgrad.lab.bench.plan import modes_on, networks_named, plan, precisions_on
from virtualgrad.lab.cli import app

QUICK = ("--tiny", "--device", "cpu", "--repeats", 1, "--seconds", 0.001, "--bandwidth", 1e10)


def run(*arguments):
    return CliRunner().invoke(
        app,
        ["bench", *(str(argument) for argument in arguments)],
        env={"COLUMNS": "200", "TERM": "dumb"},
    )


def rows_in(folder, name="summary.json"):
    return json.loads((folder / name).read_text())


def test_help_teaches():
    result = run("--help")
    assert result.exit_code == 0
    assert all(word in result.output for word in ["median", "floor", "--scaling", "resnet50"])


def test_a_whole_run_and_its_table(tmp_path):
    out, readme = tmp_path / "out", tmp_path / "README.md"
    readme.write_text("a\n<!-- bench: begin -->\n<!-- bench: end -->\nb\n")
    result = run("--models", "mlp", "--modes", "eager,graphed", "--dtypes", "tf32", *QUICK,
                 "--optimizers", "svgd", "--scaling", "--peers", "--out", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Left out: graphed. A CUDA graph needs a CUDA device." in result.output
    assert "fp32 in its place" in result.output and "MLP, tiny, batch 4" in result.output
    rows = rows_in(out)
    assert [(r["model"], r["optimizer"]) for r in rows[:2]] == [
        ("mlp-tiny", "sgd"),
        ("mlp-tiny", "svgd"),
    ]
    assert {r["model"] for r in rows} == {"mlp-tiny", "mlp-no-norm-tiny", "vgg-no-norm-tiny"}
    assert len(rows_in(out, "scaling.json")) == 4 * 2 * 3
    assert {file.name for file in out.iterdir()} == {
        "summary.json", "environment.json", "scaling.json",
        "ratio.png", "ratio.svg", "scaling.png", "scaling.svg",
    }  # fmt: skip
    again = run("--table", out, "--readme", readme)
    assert again.exit_code == 0 and "MLP, tiny, batch 4" in again.output
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("a\n") and text.endswith("b\n") and "| MLP, tiny | fp32 |" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "alexnet"], "'alexnet' is none of mlp, vgg, resnet20, resnet50, vit, gpt2"),
        (
            ["--modes", "lazy"],
            "'lazy' is none of eager, native, graphed, compiled, compiled+graphed",
        ),
        (["--dtypes", "fp8"], "'fp8' is none of fp32, tf32, bf16"),
        (["--optimizers", "lion"], "'lion' is none of sgd, momentum, rmsprop, adam, adam-fused,"),
        (["--compile-models", "x"], "'x' is none of mlp, vgg"),
        (["--device", "tpu"], "'tpu' is none of auto, cpu, cuda"),
        (["--device", "cuda:99"], "CUDA devices here; use cpu or auto"),
        (["--device", "cpu", "--modes", "graphed"], "nothing is left to measure"),
        (["--models", "none"], "nothing is left to measure"),
        (["--repeats", "0"], "should be greater than or equal to 1"),
        (["--table", "nowhere"], "does not exist"),
    ],
)
def test_refusals(arguments, words, tmp_path):
    result = run(*arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_errors_are_messages(tmp_path):
    result = run("--table", tmp_path)
    assert result.exit_code == 1 and "summary.json, which cannot be read" in result.stderr
    assert "Traceback" not in result.output


def test_inputs_that_do_not_fit_become_rows(tmp_path, monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("virtualgrad.lab.bench.run.Workshop", too_large)
    two = ("--modes", "eager,compiled")
    result = run("--models", "mlp", *two, "--optimizers", "sgd", *QUICK, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert [row["error"] for row in rows_in(tmp_path)] == ["OutOfMemoryError: no room"] * 2


def test_ctrl_c_keeps_what_is_done(tmp_path, monkeypatch):
    calls = []

    def stop_at_second(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return interleave(*arguments, **options)

    interleave = measure.interleave
    monkeypatch.setattr(measure, "interleave", stop_at_second)
    result = run("--models", "mlp,vgg", "--modes", "eager", "--optimizers", "sgd", *QUICK,
                 "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 130 and "every case that was finished is in" in result.output
    assert [row["model"] for row in rows_in(tmp_path)] == ["mlp-tiny"]


def test_a_bar_on_a_terminal(tmp_path, monkeypatch):
    console = command.Console
    monkeypatch.setattr(command, "Console", lambda **how: console(force_terminal=True, **how))
    result = run("--models", "mlp", "--modes", "eager", "--optimizers", "sgd", *QUICK,
                 "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 0 and "MLP, tiny, fp32, eager" in result.output


def test_defaults_depend_on_the_device():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [n.name for n in networks_named("", cpu, small=False)] == ["mlp", "vgg", "resnet20"]
    assert (
        len(networks_named("", gpu, small=False)) == len(networks_named("", cpu, small=True)) == 6
    )
    assert networks_named("none", gpu, small=False) == []
    assert [p.name for p in precisions_on(cpu, "")[0]] == ["fp32"]
    assert [p.name for p in precisions_on(gpu, "")[0]] == ["tf32", "bf16"]
    assert [p.name for p in precisions_on(cpu, "tf32,fp32,bf16")[0]] == ["fp32", "bf16"]
    assert modes_on(cpu, "eager")[1] == ""


def test_modes_that_cannot_be_run_here_are_left_out_with_a_reason(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr("virtualgrad.lab.bench.plan.built", lambda: None)
    modes, sentence = modes_on(gpu, "")
    assert [mode.name for mode in modes] == ["eager", "graphed", "compiled", "compiled+graphed"]
    assert sentence == (
        "Left out: native. The layers in C++ are not built: python -m virtualgrad.native."
    )
    monkeypatch.setattr("virtualgrad.lab.bench.plan.built", lambda: "a library")
    modes, sentence = modes_on(gpu, "eager,native")
    assert [mode.name for mode in modes] == ["eager", "native"] and not sentence


def test_what_only_the_host_does_is_measured_eagerly():
    cases = plan([NETWORKS["mlp"]], [PRECISIONS["fp32"]], [*MODES.values()], (*METHODS.values(),))
    unchecked = {case.mode.name: METHODS["svgd-unchecked"] in case.methods for case in cases}
    assert unchecked == {name: name in ("eager", "native") for name in MODES}
    assert all(METHODS["svgd-released"] in case.methods for case in cases)
