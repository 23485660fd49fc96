"""Trains a model that draws digits on the 1,797 images of scikit-learn, and saves it as a diffusers pipeline.

pip install "trioserve[image]" scikit-learn
python examples/train_digits.py --out build/digits
python -m trioserve serve --model build/digits
"""

import argparse
import copy
from time import perf_counter

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from sklearn.datasets import load_digits
from torch.nn import functional

SIDE, MARGIN = 32, 2  # The images have 8 x 8 pixels. Enlarging makes them smooth.
LATENT_CHANNELS = 2  # A channel has 8 x 8 numbers, so a latent has about as many numbers as an image has pixels.
ANY_CLASS = 1000  # DiTPipeline uses this class for rows without a class.
SHARE_WITHOUT_CLASS = 0.1
LEARNING_RATE = 1.5e-3
AUTOENCODER_SHARE = 0.2  # fraction of the training steps that train the autoencoder


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images, float32 [digits, 3, SIDE, SIDE] from -1 to 1, and their classes, int64 [digits]."""
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    large = functional.interpolate(small, SIDE - 2 * MARGIN, mode="bicubic").clamp(-1, 1)
    large = functional.pad(large, (MARGIN,) * 4, value=-1)
    return large.expand(-1, 3, -1, -1), torch.tensor(digits.target)


def train(what: str, model: torch.nn.Module, loss_of, batch_size: int, count: int, step_count: int) -> torch.nn.Module:
    """Train a model, and return a copy whose weights are the mean of the last steps' weights.

    Args:
        what: name of the model in progress lines.
        model: the model.
        loss_of: function that returns the loss for random indexes of training images.
        batch_size: number of indexes per step.
        count: number of training images.
        step_count: number of steps.
    """
    mean = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, total_steps=max(2, step_count), pct_start=0.1
    )
    began_at = perf_counter()
    for step in range(1, step_count + 1):
        loss = loss_of(torch.randint(count, (batch_size,)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        for of_mean, weight in zip(mean.parameters(), model.parameters(), strict=True):
            of_mean.lerp_(weight, max(1 / step, 0.01))
        if step % 100 == 0 or step == step_count:
            print(
                f"{what}: step {step} of {step_count}, loss {loss:.3f}, {perf_counter() - began_at:.0f} s", flush=True
            )
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/digits", metavar="DIR", help="folder of the trained model")
    parser.add_argument("--steps", type=int, default=2500, metavar="N", help="training steps of both networks together")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    pictures, classes = load_images()

    vae = AutoencoderKL(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=SIDE,
    )

    def loss_of_autoencoder(indices: torch.Tensor) -> torch.Tensor:
        latents = vae.encode(pictures[indices]).latent_dist
        return functional.l1_loss(vae.decode(latents.sample()).sample, pictures[indices]) + 1e-4 * latents.kl().mean()

    vae_steps = max(1, int(AUTOENCODER_SHARE * arguments.steps))
    vae = train("autoencoder", vae, loss_of_autoencoder, 32, len(pictures), vae_steps)
    with torch.no_grad():
        encoded = vae.encode(pictures).latent_dist
    vae.register_to_config(scaling_factor=1 / encoded.sample().std().item())

    transformer = DiTTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=32,
        num_layers=5,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        sample_size=SIDE // 4,
        num_embeds_ada_norm=ANY_CLASS,
    ).eval()  # In training mode, each block would drop different classes.
    for linear in (*(block.norm1.linear for block in transformer.transformer_blocks), transformer.proj_out_2):
        torch.nn.init.zeros_(linear.weight)  # At the start, a block has no effect, as in the paper's code.
        torch.nn.init.zeros_(linear.bias)
    scheduler = DDIMScheduler(clip_sample=False, timestep_spacing="trailing")

    def loss_of_transformer(indices: torch.Tensor) -> torch.Tensor:
        latents = encoded.sample()[indices] * vae.config.scaling_factor
        noise, timesteps = torch.randn_like(latents), torch.randint(1000, (len(latents),))
        asked = classes[indices].where(torch.rand(len(latents)) >= SHARE_WITHOUT_CLASS, torch.tensor(ANY_CLASS))
        noisy = scheduler.add_noise(latents, noise, timesteps)
        return functional.mse_loss(transformer(noisy, timesteps, asked).sample, noise)

    dit_steps = arguments.steps - vae_steps
    transformer = train("transformer", transformer, loss_of_transformer, 64, len(pictures), dit_steps)
    pipeline = DiTPipeline(transformer=transformer, vae=vae, scheduler=scheduler)
    pipeline.register_to_config(id2label={index: str(index) for index in range(10)})
    pipeline.save_pretrained(arguments.out)
    print(f"the model is in {arguments.out}")


if __name__ == "__main__":
    main()
