# Best settings of a sweep: MLP on MNIST, 3,000 steps.
# The learning rate changes at steps 800, 1800.
optimizers={
    "sgd": Tuned("sgd", (0.1962, 0.0981, 0.01962)),  # 2.03 ± 0.11 %
    "sgd-momentum": Tuned("sgd-momentum", (0.03344, 0.01672, 0.003344)),  # 2.06 ± 0.09 %
    "rmsprop": Tuned("rmsprop", (0.003009, 0.001504, 0.0001504)),  # 2.09 ± 0.09 %
    "adam": Tuned("adam", (0.003, 0.00015, 0.00015)),  # 2.48 ± 0.03 %
    "adamw": Tuned("adamw", (0.00257, 0.0001285, 0.0001285)),  # 2.41 ± 0.07 %
    "muon": Tuned("muon", (0.003168, 0.0001584, 0.0001584)),  # 2.33 ± 0.06 %
    "svgd": Tuned("svgd", (0.02917, 0.01459, 0.002917), {"scale": 0.02752}),  # 2.04 ± 0.02 %
}
