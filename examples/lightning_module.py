"""Lightning: return SVGD from ``configure_optimizers``; the module itself is the model."""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from virtualgrad import SVGD


class Classifier(lightning.LightningModule):
    """A classifier that trains by virtual gradients."""

    def __init__(self, lr: float = 0.05, scale: float = 0.1) -> None:
        super().__init__()
        self.lr, self.scale = lr, scale
        self.network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of a batch; Lightning does the rest."""
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> SVGD:
        """Pass the module, not its parameters."""
        return SVGD(self, self.lr, scale=self.scale)


def batches() -> DataLoader:
    """Points in four classes, always in the same order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=generator)
    y = (x @ torch.randn(20, 4, generator=generator)).argmax(1)
    return DataLoader(TensorDataset(x, y), batch_size=32)


def main() -> None:
    """Train for some epochs."""
    torch.manual_seed(0)
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=5.0,
    )
    trainer.fit(model, batches())
    print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}")


if __name__ == "__main__":
    main()
