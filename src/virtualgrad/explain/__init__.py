"""What virtual gradients would find in a model, as a table and a picture.

model -> one plain forward, recorded -> sites, and what no T acts on -> table, picture

``record`` runs every op as it is and notes those that take a parameter; ``forward`` runs the model
that way, changes nothing in it, and checks against the autograd graph that nothing was missed;
``explanation`` holds what was found; ``table``, ``picture``, ``dot`` and ``graphviz`` show it.
"""

from virtualgrad.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
