"""What would SVGD see in a model? Nothing of the model is changed by asking."""

import torch
from torch import nn

from virtualgrad import explain, weights_only

model = nn.Sequential(
    nn.Embedding(100, 16),
    nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    nn.Flatten(),
    nn.Linear(80, 10),
)
tokens = torch.randint(0, 100, (8, 5))

explanation = explain(model, tokens)
print(explanation)  # every site, the shape of its r, and what is left out

# Which parameters does no T act on, and why? None here; nn.LSTM would be such a layer.
print(explanation.uncovered)

# Only some sites: here those of the released code, weights of matmul and convolution.
weights = explain(model, tokens, where=weights_only)
print(f"r holds {explanation.state_elements:,} numbers, or {weights.state_elements:,} for weights")

# The paper's picture as text for Graphviz; explanation.save("graph.svg") draws it.
print(explanation.to_dot()[:200], "...")
