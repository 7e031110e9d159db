"""What a training step costs: SVGD beside torch's own optimizers, measured fairly.

How data flows: `plan` turns names into cases, one per network (`networks`, `modern`), number format
and way to run a step (`modes`), each with all optimizers (`methods`, `peers`). `work` builds model
and optimizer and makes steps: eagerly, compiled, or in a CUDA graph. `measure` warms them up, looks
at their memory (`memory`) and has `timing` time them in turns; `medians` are the statistics of
that, and `floor` counts what could at best be expected. Each optimizer gives a row (`rows`), which
is written as soon as its case is done (`run`). `table`, `markdown` and `plots` show the rows;
`scaling` is the same along four sizes of one network. `ranks` measures something else, several
processes that share SVGD's statistics, and `ranks_table` shows it. `command` is the command line's
`bench`.
"""

from virtualgrad.lab.bench.command import bench

__all__ = ["bench"]
