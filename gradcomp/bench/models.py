"""The models that benchmarks and examples train."""

from __future__ import annotations

import itertools

from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet of the TernGrad paper: conv5x5(20)-pool2-conv5x5(50)-pool2-fc500-fc10, SAME padding,
    ReLU.

    1,256,080 parameters. The paper's dropout is left out, because the noise of the codes already
    regularises (its section 4).

    References:
        Wen et al. 2017, TernGrad, section 5.1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2)
        self.fc1 = nn.Linear(7 * 7 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores, `(batch, 10)`, of images, `(batch, 1, 28, 28)` float32."""
        x = nn.functional.max_pool2d(self.conv1(images).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        scores: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return scores


class ByteGPT(nn.Module):
    """Decoder-only transformer over bytes: learned positions, pre-norm blocks, GELU, untied head.

    875,264 parameters with the defaults, 6,482,432 with ``width=256, layers=8, heads=8``.

    References:
        Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3.
    """

    def __init__(
        self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # as GPT-2: smaller for layers that add to the residual stream
                deep = name.endswith(("attend.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores of the next byte, `(batch, length, 256)` float32 and not normalised, of a
        text, `(batch, length)` int64 in 0..255, `length` at most the context.
        """
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attend = nn.LayerNorm(width), _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class SmallResNet(nn.Module):
    """ResNet-18 architecture for 32x32 images: four stages of two basic blocks with batch norm.

    701,466 parameters with the default width; ``width=64`` is ResNet-18 with a 3x3 stem, 11.2 M.

    References:
        He et al. 2016, Deep Residual Learning, section 4.2.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(4)]
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        pairs = itertools.pairwise([width] + [wide for wide in widths for _ in range(2)])
        self.blocks = nn.Sequential(*(_Residual(i, o) for i, o in pairs))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores, `(batch, 10)`, of images, `(batch, 3, 32, 32)` float32."""
        scores: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


class _Residual(nn.Module):
    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        stride = 1 if narrow == wide else 2
        self.conv1 = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.conv2, self.norm2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide)
        self.past: nn.Module = nn.Identity()
        if stride == 2:
            shrink = nn.Conv2d(narrow, wide, 1, 2, bias=False)
            self.past = nn.Sequential(shrink, nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        out: Tensor = (y + self.past(x)).relu()
        return out
