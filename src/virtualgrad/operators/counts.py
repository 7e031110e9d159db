r"""What compiled passes count, and how they notice a graph that was counted before.

A backward pass may go through one graph again (``backward(retain_graph=True)``), and a compiled one
has no host to ask. So graphs are numbered, from 1 after each commit. A pass knows the number k of
its graph, and a site that of the last one that it has counted:

    last <- k  and  r as ever   if k > last,      last <- NaN  and  the candidate of r, too,  if not

``step()`` looks for NaN anyway (unless told to ignore it), finds it there, and asks for the reason.
So this costs a comparison in a kernel that is launched anyway: no launch, no wait, no memory for g.

**Which graph.** The number is an input of the forward pass, and its backward pass has it from
there. After a backward pass the host puts the next number in its place. Forward passes between two
backward passes share a number, and need not be told apart: each use of a layer in them is a site of
its own. Where graphs of different numbers are consumed in another order than they were made in, the
earlier one is taken for one that comes again. That is refused, too, where it need not be.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Graphs:
    """The numbers of graphs, for all sites of one device and dtype.

    Args:
        like: r of one of the sites.
        name: under which the number of the present graph is shown to compilers.

    Attributes:
        number: that of the present graph, once for each of the three things that a site counts: a
            compiler makes one kernel of the countings of many sites if they read something
            together, but not for the sake of a single number.
        zeros: what commits set the counts of a site to.
    """

    def __init__(self, like: Tensor, name: str) -> None:
        self.name = name
        self.zeros = like.new_zeros(3)
        self._numbers: list[Tensor] = []
        self._ended = 0  # graphs since 1 was the number
        self.number = self._number()

    def begin(self, *, first: bool) -> None:
        """The passes that begin from now on belong to another graph.

        Numbers begin with 1 again (``first``) if no pass is under way, and nothing is counted. So
        all steps with one backward pass read the same tensor, as a captured one has to.
        """
        self._ended = 0 if first else self._ended + 1
        self.number = self._number()

    def _number(self) -> Tensor:
        while self._ended >= len(self._numbers):
            number = torch.full_like(self.zeros, len(self._numbers) + 1)
            # Not marked as of one size, too: those that are made while tracing would not be.
            if not torch.compiler.is_compiling():  # a zero_grad, say; it does without the mark
                torch._dynamo.mark_static_address(number)
            self._numbers.append(number)
        return self._numbers[self._ended]


def keep_static(tensor: Tensor) -> None:
    """Tell the compiler that a tensor stays where it is, and keeps its size."""
    torch._dynamo.mark_static_address(tensor, guard=True)
    torch._dynamo.mark_static(tensor)
