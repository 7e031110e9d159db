"""Every error of virtualgrad: what was given, what is allowed, what to do next.

All of them derive from :class:`VirtualGradError` and from the built-in error that a PyTorch user
would expect in that place, so ``except ValueError`` around an optimizer goes on working.
"""

from __future__ import annotations

from typing import Self


class VirtualGradError(Exception):
    """Base class of all errors that virtualgrad raises."""

    @classmethod
    def of(cls, *, given: str, allowed: str, todo: str) -> Self:
        """Build the error from the three things that a reader needs to get on."""
        return cls(f"given: {given}; allowed: {allowed}; next step: {todo}")


class HyperparameterError(VirtualGradError, ValueError):
    """A hyperparameter lies outside its range."""


class ModelError(VirtualGradError, ValueError):
    """The model, or the parameters named for it, cannot be optimized this way."""


class ClaimedParameterError(ModelError):
    """Two optimizers with virtual gradients claim the same parameter."""


class LossError(VirtualGradError, RuntimeError):
    """The loss has no graph that leads to the parameters."""


class OperatorError(VirtualGradError, TypeError):
    """An operator T returned something that does not fit the site."""


class ShapeChangedError(VirtualGradError, ValueError):
    """The shape of sigma does not fit the state that a site has gathered."""


class NonFiniteError(VirtualGradError, ArithmeticError):
    """A gradient that reached a site is NaN or infinite."""


class StateDictError(VirtualGradError, ValueError):
    """A state_dict that does not belong to this optimizer and model."""


class CheckpointError(VirtualGradError, RuntimeError):
    """A checkpoint that cannot be written or is damaged, or a folder in which none is whole."""


class NativeBuildError(VirtualGradError, RuntimeError):
    """The layers in C++ cannot be built here."""


class DamagedCheckpointWarning(VirtualGradError, UserWarning):
    """A checkpoint is truncated or altered: it is passed over, and the one before it is used."""


class DetachedError(VirtualGradError, RuntimeError):
    """The optimizer is not attached to a model, so gradients would be plain ones."""


class ScaledLossError(VirtualGradError, RuntimeError):
    """A GradScaler scaled the loss: T forgets the scale of g, so unscaling would be wrong."""


class DoubleBackwardError(VirtualGradError, RuntimeError):
    """``create_graph=True`` through a site: a virtual gradient is not differentiable."""


class RetainedGraphError(VirtualGradError, RuntimeError):
    """Two backward passes went through one compiled graph: to T they would be two micro-batches."""


class TransformError(VirtualGradError, RuntimeError):
    """A ``torch.func`` transform ran over a model with virtual gradients attached."""


class GraphvizError(VirtualGradError, RuntimeError):
    """A picture was asked for where the program ``dot`` of Graphviz cannot be found."""
