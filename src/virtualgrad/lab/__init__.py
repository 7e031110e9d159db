"""The evidence: the paper's experiments, rebuilt so that its claims can be measured again.

The library proper never imports the lab. Data flows through it in one direction: `networks` holds
the three models of the paper as the authors' released code builds them; everything that trains,
measures or reports builds on those.
"""
