# Best settings of a sweep: VGG on CIFAR-10, 3,000 steps.
# The learning rate changes at steps 1029, 2057.
optimizers={
    "sgd": Tuned("sgd", (1.881, 0.4703, 0.004703)),  # 26.12 ± 0.76 %
    "sgd-momentum": Tuned("sgd-momentum", (0.2087, 0.05217, 0.0005217)),  # 25.56 ± 0.56 %
    "rmsprop": Tuned("rmsprop", (0.01286, 0.00643, 0.001286)),  # 23.41 ± 0.15 %
    "adam": Tuned("adam", (0.007251, 0.003625, 0.001813)),  # 23.90 ± 0.10 %
    "adamw": Tuned("adamw", (0.01156, 0.00578, 0.00289)),  # 23.48 ± 0.81 %
    "svgd": Tuned("svgd", (0.0776, 0.0194, 0.000194), {"scale": 0.04818}),  # 27.93 ± 0.28 %
}
