# Best settings of a sweep: ResNet-20 on CIFAR-10, 2,000 steps.
# The learning rate changes at steps 1280, 1680.
optimizers={
    "sgd": Tuned("sgd", (2.048, 0.2048, 0.02048)),  # 20.50 ± 0.32 %
    "sgd-momentum": Tuned("sgd-momentum", (0.2721, 0.02721, 0.002721)),  # 19.99 ± 0.27 %
    "rmsprop": Tuned("rmsprop", (0.002045, 0.0002045, 0.0002045)),  # 25.37 ± 0.65 %
    "adam": Tuned("adam", (0.002507, 0.0002507, 0.0001254)),  # 23.08 ± 0.54 %
    "adamw": Tuned("adamw", (0.003217, 0.0003217, 0.0001608)),  # 23.35 ± 0.76 %
    "svgd": Tuned("svgd", (0.0298, 0.001192, 0.000596), {"scale": 0.06983}),  # 21.35 ± 0.27 %
}
