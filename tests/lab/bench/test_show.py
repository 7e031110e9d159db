"""What readers see: the terminal's table, Markdown, pictures."""

from virtualgrad.lab.bench.markdown import PLACE, SHORT, bench_blocks, bench_markdown
from virtualgrad.lab.bench.plots import draw_ratios, draw_scaling
from virtualgrad.lab.bench.rows import Row
from virtualgrad.lab.bench.table import failures, print_rows
from virtualgrad.lab.bench.titles import (
    by_case,
    method_title,
    methods_of,
    network_title,
    three_digits,
)
from virtualgrad.lab.report.readme import marks, update_readme

ENVIRONMENT = {
    "device": "NVIDIA H200",
    "torch": "2.13.0",
    "date": "2026-11-15T10:00:00+00:00",
    "commit": "0123456789",
    "settings": {"rounds": 7},
}


def test_terminal(rows, console):
    print_rows(rows, console)
    text = console.file.getvalue()
    assert "MLP, batch 32, fp32, eager" in text and "SVGD" in text
    line = next(line for line in text.splitlines() if line.startswith("SVGD"))
    assert line.split() == [
        "SVGD",
        "3.00",
        "0.100",
        "1.50",
        "0.02",
        "1.01",
        "–",
        "500",
        "B",
        "0.500",
    ]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "MLP, batch 32, fp32, compiled, Adam: OutOfMemoryError: too <big>" in text


def test_failures_of_one_kind_are_one_sentence(make_row):
    failed = [make_row(name, error="no room") for name in ("svgd", "adam")]
    assert failures(failed) == ["MLP, batch 32, fp32, eager, SVGD, Adam: no room"]


def test_markdown(rows):
    text = bench_markdown(rows, ENVIRONMENT)
    assert "NVIDIA H200, torch 2.13.0; 2026-11-15, commit 0123456; 7 rounds" in text
    assert "spread (IQR) by less than 0.020" in text
    assert "| network | format | mode | SGD, ms | SVGD | Adam |" in text
    assert "| MLP | fp32 | eager | 2.00 | 1.50 (1.01) | 1.10 |" in text
    assert "| MLP | fp32 | compiled | 1.00 | 1.10 (1.01) | failed |" in text
    assert "| MLP | 1,000 | 32 | 0.500 | 0.500 |" in text
    assert "- MLP, batch 32, fp32, compiled, Adam: OutOfMemoryError: too &lt;big>" in text
    assert "Peak memory" not in text and "Other libraries" not in text


def test_markdown_names_networks_whose_rows_are_older(rows):
    earlier = {"models": ["vit", "mlp"], "date": "2026-11-14T10:00", "commit": "abcdefabcdef"}
    others = [earlier | {"models": ["vgg"]}, earlier | {"models": ["mlp"], "which": "compiled"}]
    text = bench_markdown(rows, ENVIRONMENT | {"earlier": [earlier, *others]})
    assert "2026-11-15, commit 0123456; 7 rounds" in text
    when = "2026-11-14, commit abcdefa"
    assert f"; MLP: {when}; MLP compiled: {when}.\n" in text
    assert "ViT" not in text and "VGG" not in text  # of which there is no row


def test_markdown_with_memory_and_other_libraries(make_row):
    rows = [
        make_row(peak_bytes=100, peak_ratio_to_sgd=1.0),
        make_row("svgd", peak_bytes=150, peak_ratio_to_sgd=1.5),
        make_row(model="mlp-no-norm"),
        make_row("opacus", 4.0, model="mlp-no-norm", floor_ratio=None),
        Row("mlp-no-norm", "eager", "fp32", "singd", 32, 9, error="not installed; pip install x"),
    ]
    text = bench_markdown(rows, {})
    assert "| network | parameters | format | SVGD |" in text
    assert "| MLP | 1,000 | fp32 | 1.50 |" in text
    assert "| MLP, no norm | fp32 | eager | 2.00 | 2.00 | not installed |" in text


def test_a_lone_optimizer_and_nothing_measured(make_row):
    assert "| MLP | fp32 | eager | – | 1.50 (1.01) |" in bench_markdown([make_row("svgd", 3.0)], {})
    assert "spread" not in bench_markdown([Row("a", "b", "c", "d", 1, 2, error="e")], {})


def test_readme_marks(rows, tmp_path):
    readme = tmp_path / "README.md"
    begin, end = marks(PLACE)
    assert (begin, end) == ("<!-- bench: begin -->", "<!-- bench: end -->")
    readme.write_text(f"above\n{begin}\nold\n{end}\nbelow\n", encoding="utf-8")
    content = bench_markdown(rows, ENVIRONMENT)
    for _ in range(2):
        update_readme(readme, {PLACE: content})
    assert readme.read_text(encoding="utf-8") == (
        f"above\n{begin}\n\n{content.strip()}\n\n{end}\nbelow\n"
    )


def test_a_readme_gets_the_devices_own_time_alone(make_row):
    modes = ("compiled+graphed", "eager", "graphed")
    rows = [
        make_row(name, 2.0, mode=mode, dtype=dtype)
        for mode in modes
        for dtype in ("bf16", "tf32")
        for name in ("sgd", "svgd")
    ]
    assert list(bench_blocks(rows, ENVIRONMENT, "")) == [PLACE]
    blocks = bench_blocks(rows, ENVIRONMENT, marks(SHORT)[0])
    lines = [line.split(" | ")[1:3] for line in blocks[SHORT].splitlines() if "MLP" in line]
    assert lines == [["bf16", "graphed"], ["bf16", "compiled+graphed"]]


def test_pictures_are_the_same_bytes_every_time(rows, make_row, tmp_path):
    along = [
        make_row(name, 3.0, model=f"{axis}={value}", floor_ratio=floor)
        for axis, floor in (("batch", 1.1), ("width", None))
        for value in (2, 4)
        for name in ("svgd", "svgd-released")
    ]
    made = [
        [file.read_bytes() for file in (*draw_ratios(rows, folder), *draw_scaling(along, folder))]
        for folder in (tmp_path / "a", tmp_path / "b")
    ]
    assert made[0] == made[1]
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        "ratio.png", "ratio.svg", "scaling.png", "scaling.svg",
    ]  # fmt: skip


def test_nothing_to_draw(make_row, tmp_path):
    nothing = [make_row(), make_row("svgd", model="mlp-no-norm")]
    assert draw_ratios(nothing, tmp_path) is None
    assert draw_scaling(nothing[:1], tmp_path) is None


def test_titles_and_order(make_row):
    assert network_title("gpt2-tiny") == "GPT-2 small, tiny" and network_title("x") == "x"
    assert method_title("svgd-shared") == "SVGD shared" and method_title("mine") == "mine"
    rows = [make_row(name) for name in ("mine", "singd", "svgd", "sgd")]
    assert methods_of(rows) == ["sgd", "svgd", "singd", "mine"]
    mixed = [make_row(), make_row(model="vgg"), make_row("svgd"), make_row(dtype="bf16")]
    assert [[row.model for row in case] for case in by_case(mixed)] == [
        ["mlp", "mlp"], ["mlp"], ["vgg"],
    ]  # fmt: skip
    assert three_digits(1234.5) == "1,234" and three_digits(0.0) == "0.00"
