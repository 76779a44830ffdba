"""Convolutional networks as they stand in repositories, small, with random weights: images of any height and width."""

from __future__ import annotations

from typing import Any

import torch
from bench.zoo.entry import Shelf, ids, real
from torch import Tensor, nn
from torch.nn import functional as F

SHELF = Shelf(group="convolution", sizes={"batch": 3, "height": 32, "width": 32})
IMAGE = real("batch", 3, "height", "width")
DIGIT = real("batch", 1, 28, 28)


def block(inside: int, outside: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class LeNet(nn.Module):
    """Fixed image size, `view` with the batch in front."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for width in (8, 8, -1, 16, -1):
            layers += [nn.MaxPool2d(2)] if width < 0 else [block(inside, width)]
            inside = width if width > 0 else inside
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.pool(self.features(x)))
        return found


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = block(inside, outside, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside))
        self.down: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        return F.relu(self.second(self.first(x)) + skip)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        found: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return found


class Inverted(nn.Module):
    """MobileNetV2's block, ReLU6, with squeeze and excitation when asked."""

    def __init__(self, inside: int, outside: int, stride: int, expand: int, squeeze: bool = False) -> None:
        super().__init__()
        hidden = inside * expand
        self.expand = nn.Sequential(nn.Conv2d(inside, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6())
        self.depth = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()
        )
        self.squeeze = Squeeze(hidden) if squeeze else nn.Identity()
        self.project = nn.Sequential(nn.Conv2d(hidden, outside, 1, bias=False), nn.BatchNorm2d(outside))
        self.skips = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.squeeze(self.depth(self.expand(x))))
        return x + y if self.skips else y


class Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, channels // 4), nn.Linear(channels // 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        scale = torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3))))))
        return x * scale.view(b, c, 1, 1).expand_as(x)


class MobileNet(nn.Module):
    def __init__(self, squeeze: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            block(3, 8, stride=2), Inverted(8, 8, 1, 2, squeeze), Inverted(8, 16, 2, 4, squeeze), nn.Hardswish()
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).mean([2, 3]))
        return found


class DenseNet(nn.Module):
    """Features grow by concatenation of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8, stride=2)
        self.layers = nn.ModuleList(block(8 + 4 * i, 4) for i in range(4))
        self.transition = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 12, 1), nn.AvgPool2d(2))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        x = self.transition(torch.cat(features, 1))
        found: Tensor = self.head(F.adaptive_max_pool2d(x, (1, 1)).squeeze(-1).squeeze(-1))
        return found


class UNet(nn.Module):
    """Skips are padded to fit, so that any height and width will do."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = block(3, 8), block(8, 16), block(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1, self.out = block(32, 16), block(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.join2(torch.cat([b, self._fit(self.up2(c), b)], 1))
        a = self.join1(torch.cat([a, self._fit(self.up1(b), a)], 1))
        found: Tensor = self.out(a)
        return found

    def _fit(self, x: Tensor, like: Tensor) -> Tensor:
        dy, dx = like.size(2) - x.size(2), like.size(3) - x.size(3)
        return F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])


class ChannelsLast(nn.Module):
    """ConvNeXt's block: layer norm over channels, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(x).permute(0, 2, 3, 1)
        y = self.down(F.gelu(self.up(self.norm(y)))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.body = nn.Sequential(ChannelsLast(16), ChannelsLast(16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.patch(x))
        found: Tensor = self.head(self.norm(x.mean((-2, -1))))
        return found


class Shuffle(nn.Module):
    """Channels are shuffled by reshaping; half of them pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.worked, self.head = block(3, 16, stride=2), block(8, 8, groups=8), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left, self.worked(right)], 1)
        b, c, h, w = x.shape
        x = x.reshape(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        found: Tensor = self.head(x.amax(dim=(2, 3)))
        return found


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([block(3, 4, 1), block(3, 4, 3), block(3, 4, 5)])
        self.pooled = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = [branch(x) for branch in self.branches]
        found.append(self.pooled(F.avg_pool2d(x, 3, 1, 1)))
        features = torch.cat(found, 1)
        return {"logits": self.head(features.mean((2, 3))), "features": features}


class Segmenter(nn.Module):
    """Atrous pyramid, and the answer scaled to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8, stride=2)
        self.rates = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=r, dilation=r) for r in (1, 2, 4))
        self.whole, self.out = nn.Conv2d(8, 8, 1), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        x = self.stem(x)
        whole = F.interpolate(self.whole(F.adaptive_avg_pool2d(x, 1)), size=x.shape[-2:], mode="nearest")
        x = torch.cat([*(rate(x) for rate in self.rates), whole], 1)
        return F.interpolate(self.out(x), size=size, mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """A feature pyramid with one head over all levels, flattened as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = block(3, 8, stride=2), block(8, 8, stride=2), block(8, 8, stride=2)
        self.box, self.score = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.c1(x)
        b = self.c2(a)
        c = self.c3(b)
        b = b + F.interpolate(c, size=b.shape[-2:])
        a = a + F.interpolate(b, size=a.shape[-2:])
        levels = [a, b, c]
        boxes = torch.cat([self.box(one).flatten(2) for one in levels], -1).permute(0, 2, 1)
        scores = torch.cat([self.score(one).flatten(2) for one in levels], -1).permute(0, 2, 1)
        return boxes.relu(), scores.sigmoid()


class Yolo(nn.Module):
    """One scale, with the grid made from the size of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(block(3, 8, stride=2), block(8, 16, stride=2), block(16, 16, stride=2))
        self.head = nn.Conv2d(16, 2 * 7, 1)
        self.anchors: Tensor
        self.register_buffer("anchors", torch.tensor([[4.0, 6.0], [10.0, 8.0]]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x))
        b, _, h, w = y.shape
        y = y.view(b, 2, 7, h, w).permute(0, 1, 3, 4, 2)
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack((xs, ys), -1).to(y.dtype)
        centre = (y[..., :2].sigmoid() + grid) * 8
        size = y[..., 2:4].clamp(max=4).exp() * self.anchors[None, :, None, None]
        return torch.cat([centre, size, y[..., 4:].sigmoid()], -1).reshape(b, -1, 7)


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = block(3, 8), nn.Conv2d(8, 12, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        up = F.interpolate(x, scale_factor=2, mode="nearest")
        return torch.clamp(up + self.shuffle(self.out(self.body(x))), 0, 1)


class StyleTransfer(nn.Module):
    """Instance norm, reflection padding, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ReflectionPad2d(2)
        self.down = nn.Conv2d(3, 8, 5, 2)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.up, self.out = nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(self.down(self.pad(x))), 0.2)
        return torch.tanh(self.out(self.up(y)))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 4, 2, 1), nn.Flatten())
        self.narrow, self.wide = nn.Linear(8 * 49, 8), nn.Linear(8, 8 * 49)
        self.decode = nn.Sequential(
            nn.Unflatten(1, (8, 7, 7)), nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.narrow(self.encode(x))
        return torch.sigmoid(self.decode(F.relu(self.wide(code)))), code


class Variational(nn.Module):
    """Draws while it is trained, answers with the mean afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU())
        self.mean, self.spread = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 784), nn.Sigmoid())

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.encode(x)
        mean, log_variance = self.mean(hidden), self.spread(hidden)
        z = mean
        if self.training:
            z = mean + torch.randn_like(mean) * torch.exp(log_variance / 2)
        return {"image": self.decode(z).view(-1, 1, 28, 28), "mean": mean, "log_variance": log_variance}


class Quantized(nn.Module):
    """A codebook: the nearest entry by distance, gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 4, 4, 4), nn.ConvTranspose2d(4, 3, 4, 4)
        self.codes = nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 4)
        near = torch.cdist(flat, self.codes.weight).argmin(1)
        found = self.codes(near).view(z.shape).permute(0, 3, 1, 2)
        return self.decode(found), near.view(z.shape[:-1])


class Diffusion(nn.Module):
    """A denoiser with a sinusoidal embedding of the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 8))
        self.inside, self.norm, self.outside = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(8, dtype=x.dtype) * 0.5)
        angles = t[:, None].to(x.dtype) * rates[None]
        when = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        y = F.silu(self.norm(self.inside(x)) + when[:, :, None, None])
        return x - self.outside(y)


class Siamese(nn.Module):
    """Two images, one encoder, a cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(block(3, 8, stride=2), block(8, 8, stride=2))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = (F.normalize(self.encoder(x).mean((2, 3)), dim=-1) for x in (left, right))
        return F.cosine_similarity(a, b)


class Video(nn.Module):
    """Frames through a 2-d network, folded into the batch; then a 3-d one."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.clip = block(3, 4, stride=2), nn.Conv3d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, video: Tensor) -> Tensor:
        b, t = video.shape[:2]
        x = self.frame(video.flatten(0, 1))
        x = x.view(b, t, *x.shape[1:]).transpose(1, 2)
        found: Tensor = self.head(F.relu(self.clip(x)).mean(dim=(2, 3, 4)))
        return found


class Captcha(nn.Module):
    """A CRNN: columns of the features become time."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(block(1, 8), nn.MaxPool2d(2), block(8, 8), nn.MaxPool2d((2, 1)))
        self.rnn = nn.LSTM(32, 16, bidirectional=True)
        self.head = nn.Linear(32, 11)

    def forward(self, image: Tensor) -> Tensor:
        x = self.features(image)
        b, c, h, w = x.size()
        x = x.view(b, c * h, w).permute(2, 0, 1)
        x, _ = self.rnn(x)
        return F.log_softmax(self.head(x), dim=2).permute(1, 0, 2)


def _fill(shelf: Shelf) -> None:
    add = shelf.add
    add("lenet", LeNet, {"x": DIGIT})
    for name, model in (("vgg", Vgg), ("resnet", ResNet), ("mobilenet", MobileNet), ("densenet", DenseNet)):
        add(name, model, {"x": IMAGE})
    add("efficientnet", lambda: MobileNet(squeeze=True), {"x": IMAGE})
    for other, kind in (("unet", UNet), ("convnext", ConvNext), ("shufflenet", Shuffle), ("inception", Inception)):
        add(other, kind, {"x": IMAGE})
    add("segmenter", Segmenter, {"x": IMAGE})
    add("pyramid", Pyramid, {"x": IMAGE})
    add("yolo", Yolo, {"x": IMAGE})
    add("super_resolution", SuperResolution, {"x": IMAGE}, height=12, width=10)
    add("style_transfer", StyleTransfer, {"x": IMAGE})
    add("autoencoder", Autoencoder, {"x": DIGIT})
    add("vae", Variational, {"x": DIGIT})
    add("vq_vae", Quantized, {"x": IMAGE})
    add("diffusion", Diffusion, {"x": real("batch", 3, 16, 16), "t": ids(1000, "batch")})
    add("siamese", Siamese, {"left": IMAGE, "right": IMAGE})
    add("video", Video, {"video": real("batch", "frames", 3, 16, 16)}, frames=4)
    add("crnn", Captcha, {"image": real("batch", 1, 16, "width")}, width=40)


_fill(SHELF)
