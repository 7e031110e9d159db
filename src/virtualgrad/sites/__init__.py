"""Step 1 of the flow: which op outputs touch parameters, and is the op linear there.

model -> **sites** -> T -> virtual gradient -> update

``site`` holds the record of one use of a parameter and the meaning of sigma's axes. Two tables
know which ops are linear in which argument: ``functions`` by torch function (for encapsulation 1,
which extends ops as they run) and ``nodes`` by autograd node (for encapsulation 2, which reads the
recorded graph). They are written independently, so that each can check the other.
"""

from virtualgrad.sites.site import (
    Layout,
    Site,
    Where,
    every_linear_site,
    read_layout,
    weights_only,
)

__all__ = ["Layout", "Site", "Where", "every_linear_site", "read_layout", "weights_only"]
