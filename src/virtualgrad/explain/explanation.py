"""What was found in a model: sites, the state of SVGD, and the parameters on which no T acts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from virtualgrad.errors import ModelError
from virtualgrad.explain import graphviz, table
from virtualgrad.explain.dot import dot_text
from virtualgrad.explain.forward import Recording, record_forward
from virtualgrad.explain.picture import Picture, draw
from virtualgrad.sites import Site, Where, every_linear_site
from virtualgrad.virtual import unwrap


@dataclass(frozen=True, repr=False)
class Explanation:
    """What virtual gradients find in a model; print it for a table.

    Attributes:
        model: name of the model's class.
        sites: all uses of parameters by ops, linear or not, in the order of forward. The keys are
            those of the optimizer's state; a key that ends in ``~`` is of an op that is not linear.
        transformed: the sites at which T acts, each with the parameters chosen by ``where``.
        parameters: name -> keys of the sites that use it; every parameter is here.
        uncovered: name -> the reason, for every parameter on which no T acts.
        state_elements: how many numbers r holds at the transformed sites together, with all
            parameters in one group: parameters of one site in different groups have an r each.
        parameter_elements: how many numbers the parameters hold, frozen ones too.
        rmsprop_elements: the state of RMSProp: one number per trainable one.
        share_positions: whether r is averaged over positions.
        picture: the computational graph.
    """

    model: str
    sites: tuple[Site, ...]
    transformed: tuple[Site, ...]
    parameters: dict[str, list[str]]
    uncovered: dict[str, str]
    state_elements: int
    parameter_elements: int
    rmsprop_elements: int
    share_positions: bool
    picture: Picture = field(compare=False)

    @property
    def linear_sites(self) -> tuple[Site, ...]:
        """The sites whose op is linear in its parameters: those on which T can act."""
        return tuple(site for site in self.sites if site.linear)

    @property
    def adam_elements(self) -> int:
        """The state of Adam: two numbers per trainable one."""
        return 2 * self.rmsprop_elements

    def __str__(self) -> str:
        """The table, the totals, and the parameters on which no T acts."""
        return table.as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for notebooks, with the picture where Graphviz is installed."""
        return table.as_html(self) + graphviz.svg_or_note(self.to_dot())

    def to_dot(self) -> str:
        """The computational graph of the paper's figures, in Graphviz's language."""
        return dot_text(self.picture, title=self.model)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture: ``.dot`` or ``.gv`` as text, ``.svg``, ``.png``, ``.pdf`` by Graphviz.

        Returns:
            The path that was written.
        """
        return graphviz.save(self.to_dot(), Path(path))


def explain(
    model: nn.Module,
    *example_inputs: Any,
    where: Where | None = None,
    share_positions: bool = False,
    batch_dim: int = 0,
    **example_kwargs: Any,
) -> Explanation:
    """Find out what SVGD would see in a model: its sites, their r, and what is left out.

    The model runs forward once, on the example, and stays as it was: gradients, buffers, random
    numbers and attached optimizers are not touched.

    Args:
        model: the model.
        example_inputs: a batch, as ``model(*example_inputs, **example_kwargs)`` takes it.
        where: which of the linear sites T acts on, as for SVGD; by default all of them.
        share_positions: as for SVGD: average r over positions, too.
        batch_dim: as for SVGD: the axis of the inputs that counts samples.
        example_kwargs: keyword arguments of the model.
    """
    if not isinstance(model, nn.Module):
        raise ModelError.of(
            given=f"a {type(model).__name__} in place of the model",
            allowed="a torch.nn.Module",
            todo="call explain(model, *example_inputs)",
        )
    recording = record_forward(model, example_inputs, example_kwargs, batch_dim=batch_dim)
    transformed = _choose(recording.sites, where or every_linear_site)
    sizes = {name: p.numel() for name, p in recording.parameters.items()}
    return Explanation(
        model=type(unwrap(model)).__name__,
        sites=recording.sites,
        transformed=transformed,
        parameters={
            name: [site.key for site in recording.sites if name in site.parameters]
            for name in recording.parameters
        },
        uncovered=_uncovered(recording, transformed),
        state_elements=sum(site.state_elements(share_positions) for site in transformed),
        parameter_elements=sum(sizes.values()),
        rmsprop_elements=sum(
            sizes[name] for name, p in recording.parameters.items() if p.requires_grad
        ),
        share_positions=share_positions,
        picture=draw(recording, transformed),
    )


def _choose(sites: tuple[Site, ...], where: Where) -> tuple[Site, ...]:
    """The linear sites with the parameters for which ``where`` holds, asked one by one."""
    chosen = [
        (site, [name for name in site.parameters if where(site.only(name))])
        for site in sites
        if site.linear
    ]
    return tuple(site.only(*names) for site, names in chosen if names)


def _uncovered(recording: Recording, transformed: tuple[Site, ...]) -> dict[str, str]:
    """Parameter -> why no T acts on it, for each of its sites."""
    covered = {name for site in transformed for name in site.parameters}
    reasons: dict[str, dict[str, None]] = {
        name: {} for name in recording.parameters if name not in covered
    }
    for site in recording.sites:
        for name in site.parameters:
            if name in reasons:
                why = recording.reasons.get((site.key, name), "left out by where")
                reasons[name][why] = None
    return {name: recording.unmet.get(name) or "; ".join(found) for name, found in reasons.items()}
