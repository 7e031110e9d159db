"""From a folder of records to tables, plots and one page, beside the paper's numbers.

How data flows: `checks` refuses records that are damaged or must not be averaged; `sections` groups
the rest, one section per recipe with a cell per optimizer. `content` is what there is to say of a
section: `tables` turns it into rows and `verdict` says in words what the numbers show, or, where
the optimizers are readings of SVGD, `readings` does both. `markdown`, `terminal` and `page` write
it each in their own language. `bands` takes means over seeds and `plots` draws them, as files and
for the page. `write` puts it all into a folder, `precision` compares two folders in different
number formats, and `command` is the command line's `report`.
"""

from virtualgrad.lab.report.command import report
from virtualgrad.lab.report.terminal import print_table
from virtualgrad.lab.report.write import write_report

__all__ = ["print_table", "report", "write_report"]
